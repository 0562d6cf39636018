"""A `vllm serve` that cannot start. One that starts is in tests/examples/test_single_node.py."""

import json
from pathlib import Path

import pytest

from tests.engine.workload import ModelPath
from tests.servers import START_S, free_port, server
from vllm_hisparse.testing.harness import hisparse
from vllm_hisparse.testing.models import SEPARATE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_unknown_option_ends_the_server_with_its_name(model_path: ModelPath, tmp_path: Path) -> None:
    port = free_port()
    command = ["vllm", "serve", str(model_path(SEPARATE)), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "512", "--kv-transfer-config", json.dumps(hisparse(host_pool_gb=1))]
    with server(command, port, tmp_path / "serve.log") as running:
        assert running.process.wait(START_S) != 0
        assert running.log.count("unknown options ['host_pool_gb']") == 1
