"""The same tests on the next vLLM: the Python tree of its CUDA wheel is enough for the scheduler side."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NEXT_VLLM = Path(sys.prefix) / "vllm-0.33"
MIN_TESTS = 200


@pytest.mark.timeout(900)  # a suite of its own, that hangs or does not: machines differ
def test_on_vllm_033() -> None:
    if os.environ.get("HISPARSE_NEXT_VLLM"):
        pytest.skip("this is that run")
    if not NEXT_VLLM.is_dir():
        pytest.skip(f"no vLLM 0.33 at {NEXT_VLLM}: ./run setup fetches it")
    here = Path(__file__).parent
    path = os.pathsep.join([str(NEXT_VLLM), str(here.parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "HISPARSE_NEXT_VLLM": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long"]
    result = subprocess.run(
        [*command, str(here), str(here.parent / "compat")],
        env=environment,
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, result.stdout
    assert int(passed.group(1)) >= MIN_TESTS, result.stdout


def test_which_vllm_this_is() -> None:
    """The re-run must not quietly test the version that is installed."""
    import vllm

    expected = "0.33" if os.environ.get("HISPARSE_NEXT_VLLM") else "0.3"
    assert vllm.__version__.startswith(expected)
