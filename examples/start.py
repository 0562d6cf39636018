"""Starts the services of a compose.json on this machine, without containers: the same commands.

    python examples/start.py examples/single-node
    MODEL=/models/mine GPUS=4 python examples/start.py examples/single-node

Ends when one of them does, or on SIGTERM or Ctrl-C; then all of them are ended.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = re.compile(r"\$\{(\w+)(?::-([^{}]*))?\}")
STOP_S = 60


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
    """Runs all services; returns the exit status of the first that ended."""
    services = read(Path(sys.argv[1]) / "compose.json", os.environ)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    running = [
        subprocess.Popen(service.command, env={**os.environ, **service.environment})
        for service in services.values()
    ]
    try:
        while all(process.poll() is None for process in running):
            time.sleep(0.5)
        return next(process.returncode for process in running if process.returncode is not None)
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(running)


def _stop(running: list[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.terminate()
    deadline = time.monotonic() + STOP_S
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in running:
        process.kill()  # nothing to those that have ended


if __name__ == "__main__":
    sys.exit(main())
