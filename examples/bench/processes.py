"""Engines in processes of their own: start them, wait, read what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from engine_worker import Run, mark

from vllm_hisparse.cli.signals import Stopped, note_signals

WORKER = Path(__file__).with_name("engine_worker.py")
ERROR_LINES = 25
POLL_S = 0.1


class Engine:
    """An engine that has been started. What it logs goes beside its result file."""

    def __init__(self, run: Run, timeout_s: float) -> None:
        self._out, self._log = Path(run.out), Path(run.out).with_suffix(".log")
        self._timeout_s = timeout_s
        self._has_ended = False
        self._out.unlink(missing_ok=True)
        self._began = time.monotonic()
        command = [sys.executable, str(WORKER), json.dumps(asdict(run))]
        with self._log.open("w") as log:
            # A session of its own: Ctrl-C does not reach it, and what it starts can be ended with it.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), start_new_session=True
            )

    def is_running(self) -> bool:
        """False once it has ended. One that takes too long is ended here."""
        if self._has_ended:
            return False
        seconds = time.monotonic() - self._began
        if self._process.poll() is None:
            if seconds < self._timeout_s:
                return True
            self.end()
            with self._log.open("a") as log:
                log.write(f"\nstopped after {self._timeout_s} s\n")
        self._has_ended = True
        print(f"{self._out.stem}: {seconds:.0f} s", file=sys.stderr, flush=True)
        return False

    def end(self) -> None:
        """Kill it if it is still there, with everything that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def result(self) -> dict[str, Any]:
        """What it wrote; if it failed, {"error": the last lines of its log}."""
        if self._out.exists():
            return dict(json.loads(self._out.read_text()))
        last = self._log.read_text().splitlines()[-ERROR_LINES:]
        return {"error": "\n".join([f"{self._out.stem}:", *last])}


def environment() -> dict[str, str]:
    """This package is the one that the engines import."""
    root = str(WORKER.parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextmanager
def watched() -> Iterator[tuple[list[Engine], Callable[[], None]]]:
    """(engines, all of which are ended with this block, and a call that waits a moment).

    The call looks at each engine's time, and raises Stopped after Ctrl-C, SIGTERM or SIGHUP. For the main
    thread.
    """
    engines: list[Engine] = []
    with note_signals() as check:

        def wait() -> None:
            check()
            time.sleep(POLL_S)
            for engine in engines:
                engine.is_running()

        try:
            yield engines, wait
        finally:
            for engine in engines:
                engine.end()


def run_engines(runs: Sequence[Run], at_once: int, timeout_s: float) -> list[dict[str, Any]]:
    """Results in the order of `runs`; a failed one is {"error": text}. Raises Stopped, see `watched`."""
    waiting = list(runs)
    with watched() as (engines, wait):
        while (num_running := sum(engine.is_running() for engine in engines)) or waiting:
            for run in waiting[: at_once - num_running]:
                engines.append(Engine(run, timeout_s))
            del waiting[: at_once - num_running]
            wait()
        return [engine.result() for engine in engines]


def run_in_turn(
    runs: Sequence[tuple[Hashable, Run]], at_once: int, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Results in the order of `runs`; a failed one is {"error": text}. Raises Stopped, see `watched`.

    Engines start side by side, `at_once` together, which takes most of the time. Then they take turns, and
    those that wait take nothing but memory: of neighbours with the same key, each does its first round, then
    each its second, so that whatever else the machine does in the meantime falls on all of them. `start_s`
    says little then.
    """
    for first in range(0, len(runs), at_once):
        with watched() as (engines, wait):
            chosen = []
            for key, given in runs[first : first + at_once]:
                run = replace(given, in_turn=True)
                for path in Path(run.out).parent.glob(f"{Path(run.out).stem}.*-[0-9]*"):
                    path.unlink()  # of an earlier bench in the same folder
                engines.append(Engine(run, timeout_s))
                chosen.append((key, run, engines[-1]))
            for _, run, engine in chosen:
                while engine.is_running() and not mark(run, "started").exists():
                    wait()
            for _, neighbours in groupby(chosen, key=lambda engine: engine[0]):
                yield from _take_turns([(run, engine) for _, run, engine in neighbours], wait)


def _take_turns(engines: Sequence[tuple[Run, Engine]], wait: Callable[[], None]) -> Iterator[dict[str, Any]]:
    for number in range(max(run.rounds for run, _ in engines)):
        for run, engine in engines:
            mark(run, "turn", number).touch()
            while engine.is_running() and not mark(run, "done", number).exists():
                wait()
    for _, engine in engines:
        while engine.is_running():
            wait()
        yield engine.result()


def run_script(main: Callable[[], None]) -> None:
    """A script that uses `watched`. After a signal it ends with the exit status that shells know for it."""
    try:
        main()
    except Stopped as stopped:
        sys.exit(stopped.status)
