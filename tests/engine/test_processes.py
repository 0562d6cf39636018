"""Engines in processes of their own: nothing is shared with the scheduler but messages."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import environment
from tests.engine.workload import ENGINE_ARGS, WORDS, ModelPath, Reference, differences
from vllm_hisparse.metrics import METRICS
from vllm_hisparse.testing.engine import Completion
from vllm_hisparse.testing.harness import hisparse
from vllm_hisparse.testing.models import SEPARATE

pytestmark = pytest.mark.engine

NUM_TOKENS = 20
NUM_REQUESTS = 8
LIMIT_S = 280  # a hang is an error

TIGHT = {"num_gpu_blocks_override": 24, "kv_transfer_config": hisparse(), **ENGINE_ARGS}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def run_child(
    tmp_path: Path, model: Path, engines: Sequence[dict[str, Any]], **variables: str
) -> list[dict[str, Any]]:
    """Results of `engines`, given as engine arguments, one after the other in one program."""
    jobs = [
        {
            "model": str(model),
            "engine_args": {"dtype": "bfloat16", **engine_args},
            "prompts": WORDS[:NUM_REQUESTS],
            "num_tokens": NUM_TOKENS,
        }
        for engine_args in engines
    ]
    result = tmp_path / "result.json"
    program = [sys.executable, str(Path(__file__).with_name("child.py")), str(result)]
    subprocess.run(
        program,
        input=json.dumps(jobs),
        text=True,
        env=environment(**variables),
        check=True,
        timeout=LIMIT_S,
    )
    return json.loads(result.read_text())


def completions(result: dict[str, Any]) -> list[Completion]:
    return [
        Completion(tuple(tokens), tuple(tuple((t, p) for t, p in step) for step in logprobs))
        for tokens, logprobs in result["completions"]
    ]


def check_pressure(result: dict[str, Any]) -> None:
    """Pages were spilled and read back, no row was wrong, and the last sample shows nothing leased."""
    counted = result["counters"]
    assert counted["vllm:hisparse_spilled_bytes"] > 0
    assert counted["vllm:hisparse_misses"] > 0
    assert counted.get("vllm:hisparse_unreadable_rows", 0) == 0
    assert counted.get("vllm:hisparse_overflowed_rows", 0) == 0
    assert result["gauges"]["vllm:hisparse_hot_rows"] == 0
    assert result["gauges"]["vllm:hisparse_used_host_blocks"] == 0
    assert result["gauges"]["vllm:hisparse_transfers_in_flight"] == 0


def test_engine_core_in_its_own_process(model_path: ModelPath, reference: Reference, tmp_path: Path) -> None:
    (result,) = run_child(tmp_path, model_path(SEPARATE), [TIGHT], VLLM_ENABLE_V1_MULTIPROCESSING="1")
    check_pressure(result)
    assert differences(completions(result), reference(SEPARATE, "bfloat16")) == []


@pytest.mark.timeout(LIMIT_S + 20)
def test_tensor_parallel(model_path: ModelPath, tmp_path: Path) -> None:
    """Against a plain engine of two ranks: their partial sums round differently from one rank's."""
    plain, tight = run_child(
        tmp_path,
        model_path(SEPARATE),
        [TENSOR_PARALLEL, TENSOR_PARALLEL | TIGHT],
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    check_pressure(tight)
    assert differences(completions(tight), completions(plain)) == []
    one, other = (tight["ranks"][rank] for rank in ("0", "1"))
    assert one == other, "every rank resolves the same selections and copies the same pages"
    assert len(one) == sum(metric.label == "rank" for metric in METRICS)
