"""Engines of the benchmarks, as processes: side by side at their start, one after another in their rounds."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "bench"))

import processes
from engine_worker import Run

WORKER = """
import json, sys, time
sys.path.insert(0, {bench!r})
from pathlib import Path
from engine_worker import Run, wait_for_turn

run = Run(**json.loads(sys.argv[1]))
if run.impl == "broken":
    sys.exit("no such engine")
journal = open(Path(run.out).with_name("journal"), "a", buffering=1)
print("started", file=journal)
if run.in_turn:
    wait_for_turn(Path(run.out))
print("begins", run.impl, file=journal)
time.sleep(0.3)
print("ends", run.impl, file=journal)
Path(run.out).write_text(json.dumps({{"impl": run.impl}}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(bench=str(Path(processes.__file__).parent)))
    monkeypatch.setattr(processes, "WORKER", worker)
    monkeypatch.setattr(processes, "environment", lambda: None)
    return tmp_path


def test_engines_take_turns(folder: Path) -> None:
    runs = [Run(out=str(folder / f"{i}.json"), models="", impl=i) for i in ("a", "broken", "b", "c")]
    for run in runs:  # of an earlier bench in the same folder
        Path(run.out).with_suffix(".turn").touch()
        Path(run.out).write_text("stale")
    results = list(processes.run_in_turn(runs, at_once=3, timeout_s=60))
    assert [r.get("impl") for r in results] == ["a", None, "b", "c"]
    assert "no such engine" in results[1]["error"]
    journal = (folder / "journal").read_text().splitlines()
    first = ["started", "started", "begins a", "ends a", "begins b", "ends b"]
    assert journal == [*first, "started", "begins c", "ends c"]
