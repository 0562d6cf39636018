"""Real engines on CUDA, a process each: HiSparse under pressure against full residency, bit by bit."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "bench"))

from identity import CASES, Case, compare, reference_of
from processes import run_engines

TIMEOUT_S = 900  # the first engine on a machine compiles kernels
HISPARSE_CASES = [case for case in CASES if case.ours.get("impl") != "plain"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm = pytest.importorskip("vllm")
    if "cpu" in vllm.__version__:
        pytest.skip("vLLM's CPU build")
    return tmp_path_factory.mktemp("engines")


@pytest.mark.gpu
@pytest.mark.parametrize("case", HISPARSE_CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_same_bits(case: Case, folder: Path) -> None:
    if case.num_gpus > torch.cuda.device_count():
        pytest.skip(f"needs {case.num_gpus} GPUs")
    reference = reference_of(case, str(folder / "models"), folder)
    ours: dict[str, Any] = {"impl": "ours", **case.ours, "out": str(folder / "ours.json")}
    results = run_engines([reference, replace(reference, **ours)], at_once=1, timeout_s=TIMEOUT_S)
    for result in results:
        assert "error" not in result, result["error"]
    row = compare(*results)
    torch.cuda.empty_cache()
    assert row["unreadable"] == 0
    if case.ours.get("kv_gib", 4.0) < reference.kv_gib:
        assert row["lost"] > 0, "there was no pressure"
    # Up to the first round with other steps: a later one reads the KV of an earlier one.
    num_rounds = next(
        (i for i, same in enumerate(row["same_schedule"]) if not same), len(row["same_schedule"])
    )
    assert num_rounds > 0, "the engines never scheduled the same steps"
    for i in range(num_rounds):
        assert row["same_tokens"][i] == row["same_logprobs"][i] == row["requests"]
