"""What the plugin binds to, on the vLLM at hand; scheduler/test_versions.py repeats it on the next one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_hisparse.compat.ledger import LEDGER, Seam

SEAMS = pytest.mark.parametrize("seam", LEDGER, ids=lambda s: s.symbol)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """See child.py."""
    child = Path(__file__).with_name("child.py")
    result = subprocess.run(
        [sys.executable, str(child)], cwd=child.parents[2], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(json.loads(result.stdout.splitlines()[-1]))


@SEAMS
def test_vllm_has_the_symbol_with_the_expected_signature(report: dict[str, Any], seam: Seam) -> None:
    parameters, module = report["shipped"][seam.symbol]
    assert tuple(parameters) == seam.parameters
    assert module.startswith("vllm.")


@SEAMS
def test_ours_takes_its_place(report: dict[str, Any], seam: Seam) -> None:
    expected = "vllm_hisparse." + seam.replacement.split(":")[0]
    assert report["installed"][seam.symbol] == expected
    assert seam.why
    assert seam.drop_when


def test_the_connector_is_ours(report: dict[str, Any]) -> None:
    assert report["connector"] == "vllm_hisparse.connector"


def test_installing_twice_changes_nothing(report: dict[str, Any]) -> None:
    assert report["first"] == {"error": None, "changed": True}
    assert report["second"] == {"error": None, "changed": False}


def test_an_unsupported_version_is_one_clear_error(report: dict[str, Any]) -> None:
    assert not report["other version"]["changed"]
    error = report["other version"]["error"]
    assert error.startswith("got vLLM 0.99.0; vllm-hisparse needs >= 0.32, < 0.34 because ")
    assert "install a supported vLLM" in error


@SEAMS
def test_another_signature_is_one_clear_error(report: dict[str, Any], seam: Seam) -> None:
    outcome = report["other signature"][seam.symbol]
    assert not outcome["changed"]
    for part in (f"vLLM {report['version']}", seam.symbol, "('something', 'else_')", str(seam.parameters)):
        assert part in outcome["error"], outcome["error"]
