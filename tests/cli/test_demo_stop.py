"""Ctrl-C ends the demo whenever it comes: at once, with nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interrupts import Program, interruptible, program
from vllm_hisparse.cli.demo import process
from vllm_hisparse.cli.demo.command import run_demo

__all__ = ["program"]

COMMAND = (sys.executable, "-m", "vllm_hisparse.cli", "demo", "--json")
INTERRUPTED = 130


def _engines(demo: Program) -> list[int]:
    return [process for process, command in demo.others().items() if "cli.demo.engine" in command]


def _has_log(demo: Program) -> bool:
    return any(log.stat().st_size for log in demo.temporary.glob("*/engine.log"))


MOMENTS: dict[str, Callable[[Program], object]] = {
    "an engine imports": _engines,
    "vLLM starts": _has_log,
    "one decodes, the next starts": lambda demo: "plain vLLM: step" in demo.output and _engines(demo)[1:],
}


@pytest.mark.engine
@pytest.mark.parametrize(("moment", "times"), zip(MOMENTS, (1, 1, 5), strict=True))
def test_ctrl_c_leaves_nothing_behind(program: Callable[..., Program], moment: str, times: int) -> None:
    demo = program(*COMMAND)
    demo.wait_for(lambda: MOMENTS[moment](demo))
    segments = [name for engine in _engines(demo) for name in _segments(engine)]
    assert demo.interrupt(times) == INTERRUPTED
    assert "demo: stopped" in demo.output
    demo.check_nothing_left()
    assert not [name for name in segments if Path(name).exists()]


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 25])
def test_ctrl_c_at_any_time(program: Callable[..., Program], seconds: float) -> None:
    demo = program(*COMMAND)
    time.sleep(seconds)
    assert demo.interrupt(times=2) in (0, INTERRUPTED)  # 0: a fast machine, it had ended
    demo.check_nothing_left()


@pytest.mark.parametrize("moment", ["before", "after", "ending"])
def test_ctrl_c_while_an_engine_is_started_or_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, moment: str
) -> None:
    engines: list[subprocess.Popen[bytes]] = []

    def press(now: str) -> None:
        if now == moment:
            os.kill(os.getpid(), signal.SIGINT)

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            press("before")
            super().__init__(*args, **kwargs)
            engines.append(self)
            press("after")
            if moment == "ending":
                os.kill(os.getpid(), signal.SIGTERM)

        def wait(self, timeout: float | None = None) -> int:
            press("ending")
            return super().wait(timeout)

    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexec sleep 600\n")
    engine.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(process.subprocess, "Popen", Popen)
    monkeypatch.setattr("sys.executable", str(engine))
    with interruptible():
        status = run_demo(as_json=False)
    assert status == 128 + (signal.SIGTERM if moment == "ending" else signal.SIGINT)
    assert [one.returncode for one in engines] == [-signal.SIGKILL]
    assert list(tmp_path.iterdir()) == [engine]
    assert capsys.readouterr().out.splitlines()[-1] == "demo: stopped"


def _segments(process: int) -> set[str]:
    """Files in /dev/shm that it has mapped."""
    return set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process}/maps").read_text()))
