"""How much longer `vllm serve` takes to start with a host pool to pin, and to end: plain vLLM, then ours.

Seconds from the command to an answer of /health, and from SIGTERM to the end of every process of the server;
the node's available memory before and after, since the pool has to be given back.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import environment, write_json
from engine_worker import SPARSE_PREFILLS, Run, connector, make_model
from processes import environment as variables
from processes import run_script

from vllm_hisparse.cli.signals import note_signals

GIB = 2**30
START_S, STOP_S = 300, 120
PINNED = re.compile(r"host pool of .* pinned in ([\d.]+) s")
FREED = re.compile(r"host pool of .* freed in ([\d.]+) s")


def available_gib() -> float:
    """Of the node, with what a process that has just ended gave back."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return round(int(fields["MemAvailable"].split()[0]) * 1024 / GIB, 2)


def command(run: Run, model: Path, port: int) -> list[str]:
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port)]
    words += ["--host", "127.0.0.1", "--max-model-len", "16384", "--kv-cache-dtype", "fp8"]
    words += ["--kv-cache-memory-bytes", str(int(run.kv_gib * GIB)), "--max-num-seqs", str(run.max_num_seqs)]
    words += ["--gpu-memory-utilization", "0.1"]
    if run.impl == "ours":
        words += ["--kv-transfer-config", json.dumps(connector(run))]
    else:
        words += ["--attention-config", json.dumps(SPARSE_PREFILLS)]
    return words


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def until(reached: Callable[[], bool], limit_s: float, what: str, check: Callable[[], None]) -> float:
    """Seconds that it took. Raises TimeoutError, and what `check` raises, which is called often."""
    begin = time.monotonic()
    while not reached():
        check()
        if time.monotonic() - begin > limit_s:
            raise TimeoutError(f"{what}: not after {limit_s:.0f} s")
        time.sleep(0.05)
    return round(time.monotonic() - begin, 2)


def measure(run: Run, model: Path, log: Path) -> dict[str, Any]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    plugins = {} if run.impl == "ours" else {"VLLM_PLUGINS": "none"}
    before = available_gib()
    with note_signals() as check:
        with log.open("w") as stream:
            server = subprocess.Popen(
                command(run, model, port),
                stdout=stream,
                stderr=stream,
                env=variables() | {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | plugins,
                start_new_session=True,
            )
        try:
            start_s = until(lambda: server.poll() is not None or is_ready(port), START_S, "start", check)
            if server.poll() is not None:
                raise RuntimeError("\n".join(log.read_text().splitlines()[-25:]))
            during = available_gib()
            server.send_signal(signal.SIGTERM)
            stop_s = until(lambda: server.poll() is not None and is_gone(server.pid), STOP_S, "end", check)
        finally:
            if not is_gone(server.pid):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    text = log.read_text()
    seconds = {"pinned_s": PINNED.search(text), "freed_s": FREED.search(text)}
    return {
        "impl": run.impl,
        "host_gib": run.host_gib if run.impl == "ours" else 0,
        "start_s": start_s,
        "stop_s": stop_s,
        **{key: float(found[1]) if found else None for key, found in seconds.items()},
        "available_gib": [before, during, available_gib()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host-pool-gib", type=float, default=64.0)
    parser.add_argument("--impls", default="plain,plain,ours", help="plain first: it fills the file caches")
    parser.add_argument("--folder", type=Path, help="of the model and the logs")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, impl in enumerate(args.impls.split(",")):
        run = Run(out="", models=str(folder / "models"), impl=impl, host_gib=args.host_pool_gib)
        rows.append(measure(run, make_model(run), folder / f"startup-{i}-{impl}.log"))
        print(rows[-1], flush=True)
    if args.out:
        write_json(
            args.out, environment(args.commit) | {"command": "vllm-hisparse bench startup", "rows": rows}
        )


if __name__ == "__main__":
    run_script(main)
