"""Engines of examples/bench: results in order, errors, time limits, and nothing left after Ctrl-C."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.compose import EXAMPLES
from tests.interrupts import HANG_S, Program, program

__all__ = ["program"]

# Stands for an engine: writes what it is asked to, fails, or stays, with a process of its own.
WORKER = """
import json, pathlib, subprocess, sys, time
run = json.loads(sys.argv[1])
if run["impl"] == "fails":
    sys.exit("out of luck")
if run["impl"] == "stays":
    subprocess.Popen(["sleep", "600"]).wait()
pathlib.Path(run["out"]).write_text(json.dumps({"impl": run["impl"]}))
"""
# A benchmark: folder of examples/bench, worker, number of engines at once, time limit, implementations.
BENCHMARK = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import processes
from engine_worker import Run
processes.WORKER = Path(sys.argv[2])
folder = Path(sys.argv[2]).parent
runs = [Run(out=str(folder / f"{i}.json"), models="", impl=impl) for i, impl in enumerate(sys.argv[5:])]
def main():
    print(json.dumps(processes.run_engines(runs, int(sys.argv[3]), float(sys.argv[4]))), flush=True)
processes.run_script(main)
"""


@pytest.fixture
def benchmark(tmp_path: Path, program: Callable[..., Program]) -> Callable[..., Program]:
    """Starts one: engines at once, time limit in seconds, implementations."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    return lambda *arguments: program(
        sys.executable, "-c", BENCHMARK, EXAMPLES / "bench", worker, *map(str, arguments)
    )


@pytest.mark.parametrize("at_once", [1, 3])
def test_results_are_in_order(benchmark: Callable[..., Program], at_once: int) -> None:
    running = benchmark(at_once, HANG_S, "a", "fails", "b")
    assert running.process.wait(HANG_S) == 0
    first, failed, last = json.loads(running.output.splitlines()[-1])
    assert (first, last) == ({"impl": "a"}, {"impl": "b"})
    assert failed["error"].endswith("out of luck")


def test_an_engine_that_takes_too_long_is_ended(benchmark: Callable[..., Program]) -> None:
    running = benchmark(1, 1, "stays")
    assert running.process.wait(HANG_S) == 0
    (stopped,) = json.loads(running.output.splitlines()[-1])
    assert stopped["error"].endswith("stopped after 1.0 s")
    running.check_nothing_left()


@pytest.mark.parametrize("times", [1, 5])
def test_ctrl_c_leaves_no_engine_behind(benchmark: Callable[..., Program], times: int) -> None:
    running = benchmark(2, 10 * HANG_S, "stays", "stays", "stays")
    running.wait_for(lambda: list(running.others().values()).count("sleep 600 ") == 2)
    assert running.interrupt(times) == 130
    running.check_nothing_left()
