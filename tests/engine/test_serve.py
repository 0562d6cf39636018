"""A `vllm serve` as `plan` prints it, and one that cannot start."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.engine.test_plan import assert_logged
from tests.engine.workload import ModelPath
from tests.servers import START_S, free_port, server
from vllm_hisparse.cli.plan import plan
from vllm_hisparse.testing.harness import hisparse
from vllm_hisparse.testing.models import SEPARATE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

KV_BYTES = 4 << 20


def planned(model: Path) -> dict[str, Any]:
    """A plan of pools in which a request of the tests is under pressure."""
    app = typer.Typer()
    app.command()(plan)
    words = [str(model), "--kv-gib", str(KV_BYTES / 2**30), "--kv-dtype", "bf16", "--context", "512"]
    words += ["--max-num-seqs", "8", "--max-num-batched-tokens", "96", "--host-pool-gib", "0.02", "--json"]
    words += ["--option", "prefill_staging_mib=1", "--option", "high_watermark=0.9"]
    words += ["--option", "low_watermark=0.8"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.output)
    return content


def test_the_line_of_a_plan_serves(model_path: ModelPath, tmp_path: Path) -> None:
    expected, port = planned(model_path(SEPARATE)), free_port()
    words = shlex.split(expected["serve"])
    # A GPU says by itself how much memory there is for KV, and a checkpoint which numbers it has.
    words += ["--kv-cache-memory-bytes", str(KV_BYTES), "--dtype", "bfloat16"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    words += ["--shutdown-timeout", "30"]
    with server(words, port, tmp_path / "serve.log") as running:
        running.wait_until_ready()
        prompt = " ".join(f"w{i}" for i in range(3, 403))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        usage = running.post("/v1/completions", body)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (400, 8)
        assert_logged(re.findall(r"HiSparse: (.*)", running.log), expected)
        running.check_stop()
        assert "HiSparse: host pool of 0.02 GiB freed" in running.log


def test_unknown_option_ends_the_server_with_its_name(model_path: ModelPath, tmp_path: Path) -> None:
    port = free_port()
    command = ["vllm", "serve", str(model_path(SEPARATE)), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "512", "--kv-transfer-config", json.dumps(hisparse(host_pool_gb=1))]
    with server(command, port, tmp_path / "serve.log") as running:
        assert running.process.wait(START_S) != 0
        assert running.log.count("unknown options ['host_pool_gb']") == 1
