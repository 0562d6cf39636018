"""`vllm serve` over HTTP on the loopback interface: what a user starts, sees and stops."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import environment
from tests.engine.workload import ModelPath
from vllm_hisparse.metrics import METRICS
from vllm_hisparse.testing.harness import hisparse
from vllm_hisparse.testing.models import SEPARATE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

START_S = 200
STOP_S = 30


class Server:
    """A running `vllm serve`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def post(self, path: str, body: dict[str, object]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def wait_until_ready(self) -> None:
        """Raises AssertionError with the log if the server ends or is not ready in time."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
            else:
                return
        raise AssertionError(f"not ready after {START_S} s\n{self.log}")

    def stop(self) -> int:
        """SIGTERM; returns the exit status. Raises TimeoutExpired if the server does not end in time."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(2 * STOP_S)

    def is_gone(self) -> bool:
        """Whether every process of the server's group ends in time."""
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.2)
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serve(model: Path, log: Path, *options: str) -> Iterator[Server]:
    """A process group of its own, killed on exit if the server is still there."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    # Without a timeout vLLM kills its engine process at once, and logs that it died.
    command += ["--shutdown-timeout", str(STOP_S)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", *options]
    command += ["--dtype", "bfloat16", "--max-model-len", "512", "--max-num-batched-tokens", "96"]
    command += ["--max-num-seqs", "8", "--num-gpu-blocks-override", "24", "--kv-cache-memory-bytes", "64M"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    try:
        yield Server(process, port, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def transfer(**options: object) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps(hisparse(**options))


def test_completion_metrics_log_and_stop(model_path: ModelPath, tmp_path: Path) -> None:
    with serve(model_path(SEPARATE), tmp_path / "serve.log", *transfer()) as server:
        server.wait_until_ready()
        prompt = " ".join(f"w{i}" for i in range(3, 303))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = server.post("/v1/completions", body)
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (300, 8)
        scraped = server.get("/metrics")
        missing = [metric.name for metric in METRICS if metric.name not in scraped]
        assert missing == []
        assert "HiSparse: device pool: 24 blocks" in server.log
        assert "HiSparse: host pool:" in server.log
        assert server.stop() in (0, -signal.SIGTERM)
        after_start = server.log.split("Application startup complete")[-1]
        assert "force killing" not in after_start
        # Not the API server's: that of plain vLLM, too, may log that its engine has gone.
        assert not [
            line for line in after_start.splitlines() if " ERROR " in line and "(APIServer" not in line
        ]
        assert server.is_gone(), "a process of the server is left"


def test_unknown_option_ends_the_server_with_its_name(model_path: ModelPath, tmp_path: Path) -> None:
    with serve(model_path(SEPARATE), tmp_path / "serve.log", *transfer(host_pool_gb=1)) as server:
        assert server.process.wait(START_S) != 0
        assert server.log.count("unknown options ['host_pool_gb']") == 1
