"""A server that a test starts, asks and stops, as a user does: a command line, a log, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.processes import environment

__all__ = ["START_S", "STOP_S", "Server", "free_port", "server"]

START_S = 200
STOP_S = 30


class Server:
    """A running server that answers on `port` of the loopback interface."""

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

    def counter(self, name: str) -> float:
        """A counter or gauge of /metrics, summed over its labels; 0 if there is none."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

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

    def check_stop(self) -> None:
        """Stop it. Raises AssertionError unless it ends cleanly and leaves no process behind."""
        assert self.stop() in (0, -signal.SIGTERM)
        after_start = self.log.split("Application startup complete")[-1]
        assert "force killing" not in after_start
        # Not the API server's: that of plain vLLM, too, may log that its engine has gone.
        assert not [
            line for line in after_start.splitlines() if " ERROR " in line and "(APIServer" not in line
        ]
        assert self.is_gone(), "a process of the server is left"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def server(command: Sequence[str], port: int, log: Path, **variables: str) -> Iterator[Server]:
    """`vllm ...` or `python ...` as a process group of its own, killed on exit if it is still there."""
    program = {"vllm": ["-m", "vllm.entrypoints.cli.main"], "python": []}[command[0]]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *program, *command[1:]],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(**variables),
            start_new_session=True,
        )
    try:
        yield Server(process, port, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
