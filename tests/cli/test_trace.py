"""`vllm-hisparse trace info`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.policies.streams import random_trace
from vllm_hisparse.cli.trace import app
from vllm_hisparse.traces import save_trace

RUNNER = CliRunner()


def lines(path: Path) -> dict[str, str]:
    result = RUNNER.invoke(app, ["info", str(path)])
    assert result.exit_code == 0, result.output
    cells = [line.strip("│ ").split("│") for line in result.output.splitlines() if line.count("│") == 3]
    return {name.strip(): value.strip() for name, value in cells}


def test_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    trace = random_trace(0, streams=4, steps=30, k=6, scores=False)
    top = trace.top.copy()
    top[0, 20:] = -1
    ids = np.array([0, 0, 1, 2], dtype=np.int32)
    save_trace(path, replace(trace, top=top, host=top % 2 == 0, group=ids, request=ids // 2))
    shown = lines(path)
    assert shown["streams"] == "4"
    assert shown["index groups"] == "3"
    assert shown["requests"] == "2"
    assert shown["steps"] == "20 to 30 a stream"
    assert shown["on the host only"] == f"{100 * (top % 2 == 0).sum() / (top >= 0).sum():.1f} %"
    assert shown["scores"] == "no"


def test_a_bare_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    save_trace(path, random_trace(0))
    shown = lines(path)
    assert shown["index groups"] == shown["requests"] == shown["on the host only"] == "not recorded"
    assert shown["scores"] == "yes"


def test_something_else(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    path.write_text("no trace")
    result = RUNNER.invoke(app, ["info", str(path)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert "t.npz: got no npz archive" in result.output


@pytest.mark.parametrize("arguments", [[], ["info"]])
def test_help(arguments: list[str]) -> None:
    assert "info" in RUNNER.invoke(app, [*arguments, "--help"]).output
