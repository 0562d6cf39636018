"""Engines in processes of their own: nothing is shared with the scheduler but messages."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.processes import environment
from tests.engine.workload import ENGINE_ARGS, WORDS, ModelPath, Reference, differences
from tests.leftovers import shared_memory
from vllm_hisparse.metrics import METRICS
from vllm_hisparse.runtime.host_sharing import NAME
from vllm_hisparse.testing.engine import Completion
from vllm_hisparse.testing.harness import hisparse
from vllm_hisparse.testing.models import SEPARATE

pytestmark = pytest.mark.engine

NUM_TOKENS = 20
NUM_REQUESTS = 8
LIMIT_S = 280  # a hang is an error

TIGHT = {"num_gpu_blocks_override": 24, "kv_transfer_config": hisparse(), **ENGINE_ARGS}
SPILLED = "vllm:hisparse_spilled_bytes"
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def job(
    model: Path,
    *rounds: str | None,
    kill_rank: int | None = None,
    transfers: Sequence[dict[str, Any]] | None = None,
    **engine_args: Any,
) -> dict[str, Any]:
    """One engine in a child. `rounds`: functions of planted.py, or None; see child.py. `transfers`: of the
    first prompts, computed elsewhere, which are then the only ones.
    """
    return {
        "model": str(model),
        "engine_args": {"dtype": "bfloat16", **engine_args},
        "prompts": WORDS[: NUM_REQUESTS if transfers is None else len(transfers)],
        "transfers": transfers,
        "num_tokens": NUM_TOKENS,
        "rounds": rounds or [None],
        "kill_rank": kill_rank,
    }


def run_child(directory: Path, *jobs: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
    """Results of `jobs`, one after the other in one program."""
    result = directory / "result.json"
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
    """Of a round."""
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
    ((result,),) = (
        child["rounds"]
        for child in run_child(
            tmp_path, job(model_path(SEPARATE), **TIGHT), VLLM_ENABLE_V1_MULTIPROCESSING="1"
        )
    )
    check_pressure(result)
    assert differences(completions(result), reference(SEPARATE, "bfloat16")) == []


class TwoRanks(NamedTuple):
    """Results of a plain engine and of ours, the latter killed in the end."""

    plain: dict[str, Any]
    tight: dict[str, Any]
    shm: set[str]  # files in /dev/shm that were not there before, vLLM's own apart


@pytest.fixture(scope="module")
def two_ranks(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    before = shared_memory()
    model = model_path(SEPARATE)
    plain, tight = run_child(
        tmp_path_factory.mktemp("two-ranks"),
        job(model, **TENSOR_PARALLEL),
        job(model, None, "late", "nobody_waits", kill_rank=1, **TENSOR_PARALLEL, **TIGHT),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # functions for the workers
    )
    return TwoRanks(plain, tight, shared_memory() - before)


@pytest.mark.timeout(LIMIT_S + 20)
def test_tensor_parallel(two_ranks: TwoRanks) -> None:
    """Against a plain engine of two ranks: their partial sums round differently from one rank's."""
    (expected,) = two_ranks.plain["rounds"]
    inline, late, faulty = two_ranks.tight["rounds"]
    check_pressure(inline)
    for result in (inline, late):
        assert differences(completions(result), completions(expected)) == []
    assert differences(completions(faulty), completions(expected)) != [], "the comparison cannot fail"
    one, other = (inline["ranks"][rank] for rank in ("0", "1"))
    assert (one.pop(SPILLED) > 0, other.pop(SPILLED)) == (True, 0), "one rank writes the pool that both read"
    assert one == other, "every rank resolves the same selections"
    assert len(one) == sum(metric.label == "rank" for metric in METRICS) - 1


def test_ranks_share_a_pool_that_dies_with_them(two_ranks: TwoRanks) -> None:
    (one, mine), (other, theirs) = two_ranks.tight["pools"]
    assert one != other
    assert len(mine) == 1 and mine == theirs
    assert two_ranks.tight["errors"] == ["EngineDeadError", "EngineDeadError"]
    assert [path for path in Path("/proc").glob("[0-9]*") if _has_mapped(path, mine[0])] == []
    assert two_ranks.shm == set()


def _has_mapped(process: Path, inode: str) -> bool:
    try:
        maps = (process / "maps").read_text()
    except OSError:
        return False  # gone meanwhile
    return any(NAME in line and line.split()[4] == inode for line in maps.splitlines())
