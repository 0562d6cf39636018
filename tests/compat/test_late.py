"""The plugin imports nothing of vLLM for its own sake, and is there when vLLM does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import environment


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """See late.py."""
    child = Path(__file__).with_name("late.py")
    result = subprocess.run(
        [sys.executable, str(child)], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(json.loads(result.stdout.splitlines()[-1]))


def test_only_our_own_modules_are_imported(report: dict[str, Any]) -> None:
    assert [name for name in report["imported"] if not name.startswith("vllm_hisparse.")] == []


def test_whatever_is_imported_first_the_symbols_are_ours(report: dict[str, Any]) -> None:
    assert len(report["first"]) > 10
    assert {str(found) for found in report["first"].values()} == {str({"others": [], "is_right": True})}


def test_a_module_that_is_not_there_is_one_clear_error(report: dict[str, Any]) -> None:
    error, is_unchanged = report["missing"]
    assert "without vllm.v1.worker.nowhere; vllm-hisparse needs init_hisparse_kv_cache in it" in error
    assert is_unchanged


def test_a_late_mismatch_is_an_error_for_hisparse_alone(report: dict[str, Any]) -> None:
    imported, asked = report["broken"]
    assert imported is None, "whoever does not ask for HiSparse notices nothing"
    assert "init_hisparse_kv_cache takes ('something',); vllm-hisparse needs ('kv_cache_config'," in asked


@pytest.mark.parametrize("how", ["configured", "asked"])
def test_a_late_mismatch_ends_an_engine_with_hisparse(report: dict[str, Any], how: str) -> None:
    imported, asked = report[f"broken, {how}"]
    assert imported is not None
    assert imported == asked
