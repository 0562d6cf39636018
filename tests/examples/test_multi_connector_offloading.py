"""examples/multi-connector-offloading: its server reuses prefixes with the help of both connectors."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.workload import ModelPath
from tests.examples.compose import EXAMPLES, services, tiny
from tests.servers import free_port, server
from vllm_hisparse.testing.models import SEPARATE
from vllm_hisparse.testing.offloading import offloading

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def on_the_cpu(entry: dict[str, Any]) -> None:
    """OffloadingConnector with a worker for the CPU and little memory, its other options the example's."""
    if entry["kv_connector"] == "OffloadingConnector":
        entry["kv_connector_extra_config"].update(offloading()["kv_connector_extra_config"])


def test_prefixes_come_back_from_both_connectors(model_path: ModelPath, tmp_path: Path) -> None:
    service = services("multi-connector-offloading")["vllm"]
    port = free_port()
    command = tiny(service.command, model_path(SEPARATE), port, on_the_cpu)
    with server(command, port, tmp_path / "log", **service.environment) as running:
        running.wait_until_ready()
        script = [sys.executable, EXAMPLES / "multi-connector-offloading" / "ask.py", running.url, "330", "3"]
        asked = subprocess.run(script, capture_output=True, text=True, check=True, timeout=200)
        same, found = asked.stdout.splitlines()
        assert same == "same answer: True"
        local, external = map(int, re.findall(r"\d+", found))
        assert external > 0
        assert local + external == 320
        assert running.counter("vllm:kv_offload_load_bytes_total") > 0
        assert running.counter("vllm:hisparse_spilled_bytes_total") > 0
        running.check_stop()
