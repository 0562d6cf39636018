"""An engine process, seen from the demo."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from vllm_hisparse.cli.demo.frames import Finished, Frame, Mode, Refused

__all__ = ["DemoError", "EngineProcess"]

STOP_SECONDS = 5


class DemoError(RuntimeError):
    """An engine process ended before its run did, or refused to run. The message is for the user."""


class EngineProcess:
    """Starts at once, in a session of its own: Ctrl-C reaches the demo alone, which stops its engines."""

    def __init__(self, mode: Mode, directory: Path, log_path: Path) -> None:
        self.mode = mode
        self._log_path = log_path
        self._decoder = msgspec.json.Decoder(Frame)
        command = [sys.executable, "-m", "vllm_hisparse.cli.demo.engine", mode.value, str(directory)]
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )

    def go(self) -> None:
        """Let a started engine run."""
        stdin = _pipe(self._process.stdin)
        stdin.write(b"go\n")
        stdin.flush()

    def frames(self) -> Iterator[Frame]:
        """The engine's frames, `Finished` is the last one. Raises DemoError if it fails or refuses."""
        for line in _pipe(self._process.stdout):
            frame = self._decoder.decode(line)
            if isinstance(frame, Refused):
                raise DemoError(frame.message)
            yield frame
            if isinstance(frame, Finished):
                return
        code = self._process.wait()
        raise DemoError(f"the {self.mode.value} engine ended with exit code {code}: {self._last_words()}")

    def stop(self) -> None:
        """End the process if it is still there. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the process was started with pipes"
    return pipe
