"""Prompts of another engine, decoded by two tensor-parallel ranks.

Two ranks add up partial sums and round differently from one. A request that was imported and is preempted
computes its prompt here, as with vLLM's own NixlConnector, so from then on the two sides' ranks have to round
alike for its output to depend on nothing but the prompt.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.pd import PLAIN, RemoteProducer, producer, with_nixl
from tests.engine.test_processes import LIMIT_S, NUM_TOKENS, TENSOR_PARALLEL, completions, job, run_child
from tests.engine.workload import ENGINE_ARGS, ModelPath, differences, prompts
from vllm_hisparse.testing.harness import hisparse
from vllm_hisparse.testing.models import SEPARATE

pytest.importorskip("nixl")
pytestmark = pytest.mark.engine

LEASE = {"kv_lease_duration": 600}
LENDER = {**PLAIN, "kv_connector_extra_config": LEASE}
OWN_READER = {**LENDER, "kv_role": "kv_consumer"}  # vLLM's
READER = with_nixl(hisparse(low_watermark=0.1, high_watermark=0.2), "kv_consumer", **LEASE)
ROOMY = 200  # device blocks


def consume(
    remote: RemoteProducer, model: Path, directory: Path, count: int, blocks: int, transfer: dict[str, Any]
) -> dict[str, Any]:
    """Results of a consumer of two ranks with `blocks` device blocks, for the first `count` prompts."""
    consumer = job(
        model,
        transfers=remote.prefill(prompts(NUM_TOKENS, count=count)),
        num_gpu_blocks_override=blocks,
        kv_transfer_config=transfer,
        **TENSOR_PARALLEL,
        **ENGINE_ARGS,
    )
    ((result,),) = (
        child["rounds"] for child in run_child(directory, consumer, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    )
    return result


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S + 60)
@pytest.mark.parametrize(
    ("args", "count", "blocks", "preempts"),
    [({}, 4, 40, False), (TENSOR_PARALLEL, 8, 32, True)],
    ids=["of-one-rank", "of-two-ranks"],
)
def test_same_bits(
    args: dict[str, Any], count: int, blocks: int, preempts: bool, model_path: ModelPath, tmp_path: Path
) -> None:
    """Of a producer of one rank and of one of two, as vLLM's own consumer of two ranks decodes them."""
    model = model_path(SEPARATE)
    with producer(model, tmp_path / "log", LENDER, **args, **ENGINE_ARGS) as remote:
        expected = consume(remote, model, tmp_path, count, ROOMY, OWN_READER)
        result = consume(remote, model, tmp_path, count, blocks, READER)
        assert remote.num_held == 0
    assert expected["counters"].get("vllm:num_preemptions", 0) == 0
    counted = result["counters"]
    assert (counted.get("vllm:num_preemptions", 0) > 0) == preempts
    assert counted["vllm:hisparse_imports"] == 2 * count  # each chose a landing and arrived
    assert counted["vllm:hisparse_misses"] > 0
    assert counted.get("vllm:hisparse_unreadable_rows", 0) == 0
    found, reference = completions(result), completions(expected)
    assert [len(c.token_ids) for c in found] == [NUM_TOKENS] * count
    assert differences(found, reference) == []
