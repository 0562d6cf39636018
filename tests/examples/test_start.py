"""examples/start.py: variables as Docker Compose fills them in, and processes that end together."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.start import read
from tests.examples.compose import EXAMPLES, services

SLEEP = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"


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


def start(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, EXAMPLES / "start.py", directory], start_new_session=True)


def test_all_services_end_with_the_first(tmp_path: Path) -> None:
    write(tmp_path, {"long": ["sleep", "60"], "short": ["false"]})
    process = start(tmp_path)
    assert process.wait(30) == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_all_services_end_with_a_signal(tmp_path: Path) -> None:
    up = tmp_path / "up"
    write(tmp_path, {"one": ["sleep", "60"], "two": [sys.executable, "-c", SLEEP, str(up)]})
    process = start(tmp_path)
    while not up.exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
