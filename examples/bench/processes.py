"""Engines in processes of their own: start them, wait, read what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine_worker import Run

WORKER = Path(__file__).with_name("engine_worker.py")
ERROR_LINES = 25


def run_engine(run: Run, timeout_s: float) -> dict[str, Any]:
    """The result of one engine. What it logs goes beside its result file.

    Raises RuntimeError with the log's last lines if it fails.
    """
    out, log = Path(run.out), Path(run.out).with_suffix(".log")
    out.unlink(missing_ok=True)
    begin = time.monotonic()
    with log.open("w") as stream:
        command = [sys.executable, str(WORKER), json.dumps(asdict(run))]
        try:
            subprocess.run(
                command, stdout=stream, stderr=stream, timeout=timeout_s, env=environment(), check=False
            )
        except subprocess.TimeoutExpired:
            stream.write(f"\nstopped after {timeout_s} s\n")
    print(f"{out.stem}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    if not out.exists():
        raise RuntimeError(f"{out.stem}:\n" + "\n".join(log.read_text().splitlines()[-ERROR_LINES:]))
    return dict(json.loads(out.read_text()))


def environment() -> dict[str, str]:
    """This package is the one that the engines import."""
    root = str(WORKER.parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def run_engines(runs: Sequence[Run], at_once: int, timeout_s: float) -> list[dict[str, Any]]:
    """Results in the order of `runs`; a failed one is {"error": text}."""

    def guarded(run: Run) -> dict[str, Any]:
        try:
            return run_engine(run, timeout_s)
        except RuntimeError as error:
            return {"error": str(error)}

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(guarded, runs))


def run_in_turn(runs: Sequence[Run], at_once: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Results in the order of `runs`; a failed one is {"error": text}.

    Engines start side by side, `at_once` together, which takes most of the time, and do their rounds one
    after another while the others wait and take nothing but memory. `start_s` then says little.
    """
    for first in range(0, len(runs), at_once):
        group = [replace(run, in_turn=True) for run in runs[first : first + at_once]]
        marks = [(Path(run.out).with_suffix(".started"), Path(run.out).with_suffix(".turn")) for run in group]
        for mark in [mark for pair in marks for mark in pair]:
            mark.unlink(missing_ok=True)
        with ThreadPoolExecutor(len(group)) as pool:
            engines = [pool.submit(run_engine, run, timeout_s) for run in group]
            for engine, (started, _) in zip(engines, marks, strict=True):
                while not (started.exists() or engine.done()):
                    time.sleep(0.1)
            for engine, (_, turn) in zip(engines, marks, strict=True):
                turn.touch()
                try:
                    yield engine.result()
                except RuntimeError as error:
                    yield {"error": str(error)}
