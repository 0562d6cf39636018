"""An engine process, seen from the demo."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from vllm_hisparse.cli.demo.frames import Finished, Frame, Mode, Refused

__all__ = ["DemoError", "EngineProcess"]

CHECK_SECONDS = 0.1
READ_BYTES = 1 << 16


class DemoError(RuntimeError):
    """An engine process ended before its run did, or refused to run. The message is for the user."""


class EngineProcess:
    """Starts at once, in a session of its own: Ctrl-C reaches the demo alone, which stops its engines.

    `directory` also gets the temporary files of vLLM, which does not remove all of them.
    """

    def __init__(self, mode: Mode, directory: Path, log_path: Path) -> None:
        self.mode = mode
        self._log_path = log_path
        self._decoder = msgspec.json.Decoder(Frame)
        command = [sys.executable, "-m", "vllm_hisparse.cli.demo.engine", mode.value, str(directory)]
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TMPDIR": str(directory)},
                start_new_session=True,
            )

    def go(self) -> None:
        """Let a started engine run. Of one that has ended `frames` tells."""
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).write(b"go\n")

    def frames(self, check: Callable[[], None]) -> Iterator[Frame]:
        """The engine's frames, `Finished` is the last one. Raises DemoError if it fails or refuses.

        `check` is called before every wait, which is a short one; what it raises is passed on.
        """
        for line in self._lines(check):
            frame = self._decoder.decode(line)
            if isinstance(frame, Refused):
                raise DemoError(frame.message)
            yield frame
            if isinstance(frame, Finished):
                return
        check()  # Ctrl-C may have hit it before it had its session
        while (code := self._process.poll()) is None:
            time.sleep(CHECK_SECONDS)
            check()
        raise DemoError(f"the {self.mode.value} engine ended with exit code {code}: {self._last_words()}")

    def stop(self) -> None:
        """End the process if it is still there: it has nothing to save. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()

    def _lines(self, check: Callable[[], None]) -> Iterator[bytes]:
        pipe, rest = _pipe(self._process.stdout), b""
        while True:
            check()
            if not select.select([pipe], [], [], CHECK_SECONDS)[0]:
                continue
            if not (part := os.read(pipe.fileno(), READ_BYTES)):
                return
            *lines, rest = (rest + part).split(b"\n")
            yield from lines

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the process was started with pipes"
    return pipe
