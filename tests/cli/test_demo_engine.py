"""The demo as it is: three real engines, one after the other."""

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "vllm_hisparse.cli", "demo", "--json"]


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
