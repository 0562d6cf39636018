"""The demo as it is: three real engines, one after the other."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from vllm_hisparse.cli.main import app; app()", "demo", "--json"]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_demo_shows_what_it_promises() -> None:
    result = subprocess.run(COMMAND, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["identical"] is True
    assert figures["spilled_pages"] > 0
    assert figures["host_rows_read"] > 0
    assert 0 <= figures["hit_rate"] <= 1
    assert figures["preemptions_plain"] >= 1
    assert figures["preemptions_hisparse"] == 0
    assert figures["mean_decoding_hisparse"] > figures["mean_decoding_plain"]
    assert figures["pools"]["hisparse"]["bytes"] <= figures["pools"]["plain"]["bytes"]
    assert "outputs identical to full residency: yes" in result.stderr


@pytest.mark.engine
def test_ctrl_c_leaves_no_engine_behind() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        deadline = time.monotonic() + 60
        while not (engines := _children(demo.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 130
    assert engines
    deadline = time.monotonic() + 30
    while (left := [pid for pid in engines if _is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _is_running(pid: int) -> bool:
    """Whether the process is there and has not ended: whoever adopts it may take long to notice that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], check=False, capture_output=True, text=True
    )
    return [int(word) for word in found.stdout.split()]
