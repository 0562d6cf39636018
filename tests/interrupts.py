"""Programs that a test starts and interrupts, as somebody at a terminal does."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.processes import environment

__all__ = ["HANG_S", "Program", "interruptible", "program"]

HANG_S = 60  # nothing takes as long, however busy the machine is
MARK = "STARTED_BY_TEST"


@contextmanager
def interruptible() -> Iterator[None]:
    """In here no signal is ignored, as SIGINT is in a background job of a script and SIGHUP under nohup.

    Programs that are started inherit that.
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    handlers = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Program:
    """A running program. Its temporary files are below `directory / "tmp"`."""

    def __init__(self, command: Sequence[str | Path], directory: Path, **variables: str) -> None:
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self._output = directory / "output"
        self._mark = f"{MARK}={directory}"
        marked = environment(TMPDIR=str(self.temporary), **{MARK: str(directory)}, **variables)
        with self._output.open("wb") as output, interruptible():
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=marked, start_new_session=True
            )

    @property
    def output(self) -> str:
        """What it has said on stdout and stderr."""
        return self._output.read_text(errors="replace")

    def others(self) -> dict[int, str]:
        """Command lines of the processes that it has started, by process, and those have."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (path / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:
                continue  # gone, or another user's
            if self._mark in variables and int(path.name) != self.process.pid:
                found[int(path.name)] = command
        return found

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Raises AssertionError with the output if the program ends before."""
        while not condition():
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def interrupt(self, times: int = 1) -> int:
        """Ctrl-C, for all processes of its group as a terminal does it, and again while it has not ended.

        Returns the exit status that a shell shows. Raises TimeoutExpired if the program hangs.
        """
        for _ in range(times):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGINT)
                time.sleep(0.05)
        status = self.process.wait(HANG_S)
        return status if status >= 0 else 128 - status

    def check_nothing_left(self) -> None:
        """Once it has ended: no process, no file, no traceback."""
        deadline = time.monotonic() + HANG_S
        while (left := self.others()) and time.monotonic() < deadline:
            time.sleep(0.05)  # killed, not yet gone
        assert not left
        assert os.listdir(self.temporary) == []
        assert "Traceback" not in self.output


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a `Program`; it and what it has started are killed in the end."""
    started: list[Program] = []

    def start(*command: str | Path, **variables: str) -> Program:
        directory = tmp_path / f"program-{len(started)}"
        directory.mkdir()
        started.append(Program(command, directory, **variables))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        for process in one.others():
            os.kill(process, signal.SIGKILL)
