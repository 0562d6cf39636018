"""Prompts that come again, at the sizes of the engine bench under pressure: vLLM's scheduler, no model."""

import random

import pytest

pytest.importorskip("vllm")

from vllm_hisparse.connector import HiSparseWorkerMetadata
from vllm_hisparse.messages import Acknowledgement, Progress, decode
from vllm_hisparse.simulation.engine import EngineSize, SchedulerSide
from vllm_hisparse.simulation.model import ServedModel

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
