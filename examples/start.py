"""Starts the services of a compose.json on this machine, without containers: the same commands.

    python examples/start.py examples/single-node
    MODEL=/models/mine GPUS=4 python examples/start.py examples/single-node

Ends when one of them does, or on SIGTERM or Ctrl-C; then all of them are ended, and what they have started.
They get a minute for it, in which vLLM answers the requests that it has; a second Ctrl-C kills them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = re.compile(r"\$\{(\w+)(?::-([^{}]*))?\}")
STOP_S = 60
TRACKER = b"multiprocessing.resource_tracker"  # of Python: removes shared memory when nobody uses it any more
TRACKER_S = 5


@dataclass(frozen=True)
class Service:
    """A service of a compose file, its variables filled in."""

    name: str
    command: list[str]
    environment: dict[str, str]


def read(compose: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """The services of a compose file, by name. `${NAME:-default}` is filled in as Docker Compose does it.

    Raises KeyError for a variable that is neither set nor has a default.
    """
    services = _filled_in(json.loads(compose.read_text()), variables)["services"]
    return {
        name: Service(name, service["command"], service.get("environment", {}))
        for name, service in services.items()
    }


def _filled_in(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled_in(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled_in(item, variables) for item in value]
    return VARIABLE.sub(lambda found: _value(found, variables), value) if isinstance(value, str) else value


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name, default = found.groups()
    return variables[name] if default is None else variables.get(name) or default


def main() -> int:
    """Runs the services. Returns the status of the first that ended; 0 after SIGTERM, 130 after Ctrl-C."""
    services = read(Path(sys.argv[1]) / "compose.json", os.environ)
    asked: list[int] = []  # noted, not raised: that could come while a service is being started or ended
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: asked.append(number))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for service in services.values():
            # A session of its own: Ctrl-C does not reach it, and what it starts can be told from the rest.
            environment = {**os.environ, **service.environment}
            running.append(subprocess.Popen(service.command, env=environment, start_new_session=True))
        while not asked and all(process.poll() is None for process in running):
            time.sleep(0.1)
        ended = [process.returncode for process in running if process.returncode is not None]
        if not ended:
            print("start.py: ends the services; Ctrl-C kills them", file=sys.stderr)
    finally:
        _stop(running, lambda: signal.SIGINT in asked[1:])
    if ended:
        return _shown(ended[0])
    return 0 if asked[0] == signal.SIGTERM else _shown(-asked[0])


def _shown(status: int) -> int:
    """An exit status as shells show it."""
    return status if status >= 0 else 128 - status


def _stop(running: list[subprocess.Popen[bytes]], in_a_hurry: Callable[[], bool]) -> None:
    """SIGTERM for each service, then SIGKILL for every process of theirs that is left in the end."""
    for process in running:
        process.terminate()  # nothing to those that have ended
    sessions = {process.pid for process in running}
    deadline = time.monotonic() + STOP_S
    while _members(sessions) and time.monotonic() < deadline and not in_a_hurry():
        time.sleep(0.1)
    deadline = time.monotonic() + TRACKER_S
    while left := _members(sessions):
        for pid, command in left.items():
            if TRACKER not in command or time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for process in running:
        process.wait()


def _members(sessions: set[int]) -> dict[int, bytes]:
    """Processes of sessions that have not ended, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ends meanwhile
            state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) in sessions and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found


if __name__ == "__main__":
    sys.exit(main())
