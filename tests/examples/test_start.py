"""examples/start.py: variables as Docker Compose fills them in, and processes that end together."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.start import read
from tests.examples.compose import EXAMPLES, services
from tests.interrupts import HANG_S, Program, program

__all__ = ["program"]

SLEEP = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
# A service that has shared memory and does not end when it is asked to.
DEAF = """
import os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
segment = SharedMemory(create=True, size=1)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(segment.name)
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def write(directory: Path, commands: dict[str, list[str]]) -> Path:
    path = directory / "compose.json"
    path.write_text(json.dumps({"services": {name: {"command": c} for name, c in commands.items()}}))
    return path


def test_variables(tmp_path: Path) -> None:
    command = ["a ${ONE} b", "${TWO:-two}", "{${THREE:-3}}", "${FOUR:-}", "$5"]
    compose = write(tmp_path, {"service": command})
    set_ = {"ONE": "1", "THREE": ""}
    assert read(compose, set_)["service"].command == ["a 1 b", "two", "{3}", "", "$5"]
    with pytest.raises(KeyError, match="ONE"):
        read(compose, {})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/compose.json")), ids=lambda path: path.parent.name)
def test_every_example_can_be_read(path: Path) -> None:
    for service in services(path.parent.name).values():
        assert all(isinstance(word, str) for word in service.command)
        assert "${" not in " ".join(service.command)


def start(program: Callable[..., Program], directory: Path) -> Program:
    return program(sys.executable, EXAMPLES / "start.py", directory)


def test_all_services_end_with_the_first(tmp_path: Path, program: Callable[..., Program]) -> None:
    write(tmp_path, {"long": ["sleep", "600"], "short": ["false"]})
    running = start(program, tmp_path)
    assert running.process.wait(HANG_S) == 1
    running.check_nothing_left()


def test_services_end_if_one_cannot_be_started(tmp_path: Path, program: Callable[..., Program]) -> None:
    write(tmp_path, {"long": ["sleep", "600"], "wrong": [str(tmp_path / "nothing")]})
    running = start(program, tmp_path)
    assert running.process.wait(HANG_S) == 1
    assert "FileNotFoundError" in running.output
    assert running.others() == {}


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_all_services_end_with_a_signal(
    tmp_path: Path, program: Callable[..., Program], number: int, status: int
) -> None:
    up = tmp_path / "up"
    write(tmp_path, {"one": ["sleep", "600"], "two": [sys.executable, "-c", SLEEP, str(up)]})
    running = start(program, tmp_path)
    running.wait_for(up.exists)
    running.process.send_signal(number)
    assert running.process.wait(HANG_S) == status
    running.check_nothing_left()


def test_what_a_service_leaves_is_ended(tmp_path: Path, program: Callable[..., Program]) -> None:
    write(tmp_path, {"one": ["sh", "-c", "sleep 600 & exec sleep 600"]})
    running = start(program, tmp_path)
    running.wait_for(lambda: len(running.others()) == 2)
    assert running.interrupt(times=2) == 130
    running.check_nothing_left()


def test_a_second_ctrl_c_kills_and_leaves_no_shared_memory(
    tmp_path: Path, program: Callable[..., Program]
) -> None:
    up = tmp_path / "up"
    write(tmp_path, {"deaf": [sys.executable, "-c", DEAF, str(up)]})
    running = start(program, tmp_path)
    running.wait_for(up.exists)
    segment = Path("/dev/shm") / up.read_text()
    assert segment.exists()
    assert running.interrupt(times=2) == 130
    assert running.others() == {}
    assert not segment.exists()
