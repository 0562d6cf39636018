"""examples/single-node: its command line starts a server that answers, counts, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.workload import ModelPath
from tests.examples.compose import EXAMPLES, services, tiny
from tests.servers import free_port, server
from vllm_hisparse.metrics import METRICS
from vllm_hisparse.testing.models import SEPARATE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_answer_metrics_log_and_stop(model_path: ModelPath, tmp_path: Path) -> None:
    service = services("single-node")["vllm"]
    port = free_port()
    command = tiny(service.command, model_path(SEPARATE), port)
    with server(command, port, tmp_path / "log", **service.environment) as running:
        running.wait_until_ready()
        script = [sys.executable, EXAMPLES / "single-node" / "ask.py", running.url]
        asked = subprocess.run(script, capture_output=True, text=True, check=True, timeout=100)
        answer, *counted = asked.stdout.splitlines()
        assert len(answer.split()) > 1
        assert any('residency="full"' in line for line in counted)
        scraped = running.get("/metrics")
        missing = [metric.name for metric in METRICS if metric.name not in scraped]
        assert missing == []
        assert "HiSparse: device pool: 24 blocks" in running.log
        assert "HiSparse: host pool:" in running.log
        running.check_stop()
