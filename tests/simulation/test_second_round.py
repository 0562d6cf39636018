"""Prompts that come again, at the sizes of the engine bench under pressure: vLLM's scheduler, no model."""

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_hisparse.connector import HiSparseWorkerMetadata
from vllm_hisparse.messages import Acknowledgement, Progress, decode
from vllm_hisparse.simulation.engine import EngineSize, SchedulerSide
from vllm_hisparse.simulation.model import ServedModel
from vllm_hisparse.testing.engine_config import EngineOptions
from vllm_hisparse.testing.scheduler import SchedulerRig

SHARED = ServedModel("shared", num_layers=8, num_leaders=2, row_bytes=656, key_bytes=132, top_k=2048)
REQUESTS, CONTEXT = 16, 65536


def run_round(side: SchedulerSide, name: str, prompts: list[list[int]], num_tokens: int) -> int:
    """All prompts at once, copies acknowledged a step later. Returns the prompt tokens that were computed."""
    for i, prompt in enumerate(prompts):
        side.add(f"{name}-{i}", prompt, max_tokens=num_tokens)
    computed, ack = 0, None
    while side.scheduler.has_unfinished_requests():
        output = side.scheduler.schedule()
        computed += sum(n for n in output.num_scheduled_tokens.values() if n > 1)
        result = side.result(output, ack)
        transfer = decode(output.kv_connector_metadata.payload).transfer_id
        done = Acknowledgement({0: Progress(transfer, transfer)})
        ack = HiSparseWorkerMetadata(done) if transfer >= 0 else None
        side.scheduler.update_from_output(output, result)
    return computed


@pytest.mark.long
def test_keys_that_fit_are_kept() -> None:
    """All their keys fit the pool beside what decoding takes, so nothing but tails is computed again.

    The figure is in docs/benchmarks.md.
    """
    size = EngineSize(
        model=SHARED,
        device_gib=0.8,
        host_gib=16.0,
        max_requests=REQUESTS,
        max_model_len=CONTEXT + 1088,
        max_step_tokens=8192,
    )
    side = SchedulerSide(size)
    draw = random.Random(7)
    prompts = [[draw.randrange(5, 31000) for _ in range(CONTEXT - 17 * i)] for i in range(REQUESTS)]
    num_tokens = sum(map(len, prompts))
    assert run_round(side, "first", prompts, 32) == num_tokens
    assert run_round(side, "second", prompts, 64) == 2055


@pytest.mark.long
def test_nothing_is_computed_again_if_keys_are_offloaded(tmp_path: Path) -> None:
    """An indexer in every layer: the keys of eight requests fill the pool, a store beside it has all.

    The blocks of the engine bench, with pages of 4 tokens instead of 64. Figures are in docs/benchmarks.md.
    """
    page, num_pages = 4, 1024
    options = EngineOptions(
        num_device_blocks=2118,
        num_host_blocks=26000,
        page_tokens=page,
        indexer_pages=5,
        max_requests=REQUESTS,
        max_step_tokens=512,
        max_model_len=num_pages * page + 136,
        top_k=128,
        hot_rows=256,
        max_hot_rows=512,
        low=0.08,
        high=0.20,
        prefix_share=0.5,
        async_scheduling=True,
        num_offload_chunks=4000,
        offload_prompt_only=False,
    )
    rig = SchedulerRig(options, tmp_path)
    rig.check = lambda: None  # type: ignore[method-assign]  # it looks at every block, after every step
    rig.num_misses = 400
    draw = random.Random(7)
    prompts = [[draw.randrange(5, 31000) for _ in range(num_pages * page - 2 * i)] for i in range(REQUESTS)]
    batches: list[int] = []
    for name, max_tokens in (("first", 32), ("second", 120)):
        for i, prompt in enumerate(prompts):
            rig.add(f"{name}-{i}", prompt, max_tokens=max_tokens)
        computed, batches = 0, []
        while rig.scheduler.has_requests() or rig.in_flight:
            rig.step()
            if rig.in_flight:
                tokens = list(rig.in_flight[-1][0].num_scheduled_tokens.values())
                computed += sum(n for n in tokens if n > 1)
                batches.append(len(tokens))
        assert computed == (sum(map(len, prompts)) if name == "first" else 176)
    assert len(batches) < 2.2 * 120  # two by two times eight
    assert batches.count(8) > 1.9 * 120
    SchedulerRig.check(rig)
