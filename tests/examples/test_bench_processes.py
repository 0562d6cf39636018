"""Engines of the benchmarks, as processes: side by side at their start, one after another in their rounds."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "bench"))

import processes
from engine_worker import Run, mark

WORKER = """
import json, sys, time
sys.path.insert(0, {bench!r})
from pathlib import Path
from engine_worker import Run, turns

run = Run(**json.loads(sys.argv[1]))
if run.impl == "broken":
    sys.exit("no such engine")
journal = open(Path(run.out).with_name("journal"), "a", buffering=1)
print("starts", file=journal)
for turn in turns(run):
    with turn:
        print("begins", run.impl, file=journal)
        time.sleep(0.2)
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
    runs = [Run(out=str(folder / f"{i}.json"), models="", impl=i, rounds=2) for i in "abcd"]
    runs[1] = replace(runs[1], impl="broken")
    for run in runs:  # of an earlier bench in the same folder
        mark(run, "turn", 1).touch()
        Path(run.out).write_text("stale")
    keyed = list(zip(("first", "first", "first", "second"), runs, strict=True))
    results = list(processes.run_in_turn(keyed, at_once=4, timeout_s=60))
    assert [r.get("impl") for r in results] == ["a", None, "c", "d"]
    assert "no such engine" in results[1]["error"]
    journal = (folder / "journal").read_text().splitlines()
    assert journal[:3] == ["starts"] * 3
    assert journal[3::2] == ["begins a", "begins c", "begins a", "begins c", "begins d", "begins d"]
    assert journal[4::2] == ["ends a", "ends c", "ends a", "ends c", "ends d", "ends d"]


def test_engines_that_are_too_many_at_once(folder: Path) -> None:
    runs = [(0, Run(out=str(folder / f"{i}.json"), models="", impl=i)) for i in "ab"]
    assert [r["impl"] for r in processes.run_in_turn(runs, at_once=1, timeout_s=60)] == ["a", "b"]
    first, second = (["starts", f"begins {i}", f"ends {i}"] for i in "ab")
    assert (folder / "journal").read_text().splitlines() == first + second
