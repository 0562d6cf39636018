"""`vllm-hisparse plan`: what it prints, as text and as JSON, and what it refuses."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_hisparse.cli.plan import plan
from vllm_hisparse.config import GIB, read_options
from vllm_hisparse.planning.estimate import Setup, estimate
from vllm_hisparse.planning.models import load_model
from vllm_hisparse.testing.models import SEPARATE, config

APP = typer.Typer()
APP.command()(plan)
RUNNER = CliRunner()
GLM = ("glm-5.2", "--gpu", "h200", "--tp", "8", "--context", "202752")


def run(*arguments: str) -> str:
    result = RUNNER.invoke(APP, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return content


def test_text() -> None:
    output = run(*GLM, "--host-pool-gib", "256")
    for part in (
        "glm-5.2: requests of 202,752 tokens, fp8 KV (656 bytes a row), 8 GPUs",
        "with hot regions of 4,096 rows, ",
        "limited by host: raise host_pool_gib",
        "estimated for h200",
        "256 GiB, one for all GPUs of a node; with ",
    ):
        assert part in output, part


def test_json_says_what_the_estimate_says() -> None:
    content = run_json("glm-5.2", "--kv-gib", "36", "--tp", "8", "--context", "202752", "--mtp", "2")
    result = estimate(Setup(load_model("glm-5.2"), 36 * GIB, 202752, speculative_tokens=2))
    for key in ("plain", "admission", "steady", "floor"):
        assert content[key]["value"] == pytest.approx(float(getattr(result, key).value), abs=1e-4)
        assert content[key]["limit"] == getattr(result, key).limit
    assert content["host_pool_gib"] == result.host_budget_bytes / GIB
    assert content["gpu"] is None
    assert content["starts"]


def test_the_serve_line_is_what_was_planned() -> None:
    words = shlex.split(
        run_json(
            *GLM, "--host-pool-gib", "256", "--mtp", "1", "--max-num-seqs", "64",
            "--device-buffer-size", "8192", "--option", "skip_io=false", "--no-async-scheduling",
            "--gpu-memory-utilization", "0.9",
        )["serve"]
    )  # fmt: skip
    assert words[:3] == ["vllm", "serve", "zai-org/GLM-5.2-FP8"]
    flags = dict(zip(words[3::2], words[4::2], strict=False))
    assert flags["--tensor-parallel-size"] == "8"
    assert flags["--max-model-len"] == "202752"
    assert flags["--kv-cache-dtype"] == "fp8"
    assert flags["--gpu-memory-utilization"] == "0.9"
    assert "--no-async-scheduling" in words
    values = {word.split(":")[0]: json.loads(word) for word in words if word.startswith("{")}
    assert values['{"method"'] == {"method": "mtp", "num_speculative_tokens": 1}
    assert values['{"hisparse_config"'] == {"hisparse_config": {"device_buffer_size": 8192}}
    transfer = values['{"kv_connector"']
    assert read_options(transfer["kv_connector_extra_config"])["host_pool_gib"] == 256


def test_short_requests_need_no_hisparse() -> None:
    content = run_json("deepseek-v3.2", "--kv-gib", "40", "--context", "1024", "--max-num-seqs", "1024")
    assert content["steady"]["value"] <= content["plain"]["value"]
    assert content["advice"].startswith("leave HiSparse off")


def test_pools_that_are_too_small() -> None:
    device = run_json("glm-5.2", "--kv-gib", "1")
    assert not device["starts"]
    assert device["advice"].startswith("does not start: a request needs more device blocks")
    host = run_json("glm-5.2", "--kv-gib", "20", "--host-pool-gib", "1")
    assert host["advice"] == (
        "does not start: all pages of a request are on the host; raise host_pool_gib to 6.26"
    )


def test_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(SEPARATE)))
    content = run_json(str(tmp_path), "--kv-gib", "1", "--kv-dtype", "fp32", "--context", "512")
    assert content["row_bytes"] == 320
    assert shlex.split(content["serve"])[2] == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("glm-5.2",), "got neither --gpu nor --kv-gib"),
        (("glm-5.2", "--gpu", "v100"), "got --gpu v100; need"),
        (("glm-5.2", "--gpu", "h100", "--tp", "8"), "GiB too small for glm-5.2"),
        (("glm-4", "--kv-gib", "1"), "got model 'glm-4'"),
        (("glm-5.2", "--kv-gib", "0"), "got --kv-gib 0; need"),
        (("glm-5.2", "--kv-gib", "9", "--host-pool-gib", "-1"), "got -1 GiB of host memory"),
        (("glm-5.2", "--kv-gib", "9", "--option", "policy"), "got --option policy; need KEY=JSON"),
        (("glm-5.2", "--kv-gib", "9", "--option", "host_pool_gib=3"), "need --host-pool-gib"),
        (("glm-5.2", "--kv-gib", "9", "--option", "polcy=1"), "got unknown options ['polcy']"),
        (("glm-5.2", "--kv-gib", "9", "--kv-dtype", "fp4"), "got KV dtype 'fp4'"),
    ],
)
def test_errors(arguments: tuple[str, ...], message: str) -> None:
    result = RUNNER.invoke(APP, arguments, env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_planning_takes_neither_vllm_nor_torch() -> None:
    code = "import sys, vllm_hisparse.cli.plan; sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
