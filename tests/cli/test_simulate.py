"""`vllm-hisparse simulate policy`: figures, files and errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.policies.streams import random_trace
from vllm_hisparse.cli.simulate import app, parse_rows
from vllm_hisparse.policies.registry import POLICIES
from vllm_hisparse.policies.replay import replay
from vllm_hisparse.traces import save_trace

RUNNER = CliRunner()
NEED_SCORES = {name for name, policy in POLICIES.items() if policy.needs_scores}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.npz"
    save_trace(path, random_trace(0, scores=False))
    return path


def test_rows_are_absolute_or_multiples() -> None:
    assert parse_rows("2k,1.25k,300", 128) == (256, 160, 300)
    with pytest.raises(ValueError, match="got rows '2q'; need a number such as 4096, or a multiple"):
        parse_rows("3k,2q", 128)


def test_figures_are_printed_and_written(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    result = RUNNER.invoke(app, ["policy", str(trace_file), "--rows", "2k,20", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "small: 3 streams, 60 steps, top-k 6" in result.output
    report = json.loads(out.read_text())["traces"]["small"]
    assert report["rows"] == [12, 20]
    assert set(report["miss_percent"]) == set(POLICIES) - NEED_SCORES
    want = replay(random_trace(0, scores=False), POLICIES["lru"], 12).miss_percent
    assert report["miss_percent"]["lru"][0] == round(want, 2)
    assert f"{want:.2f}" in result.output


def test_a_choice_of_policies(tmp_path: Path) -> None:
    path, out = tmp_path / "scored.npz", tmp_path / "figures.json"
    save_trace(path, random_trace(0))
    RUNNER.invoke(app, ["policy", str(path), "--policy", "saf", "--policy", "lru", "--json", str(out)])
    assert list(json.loads(out.read_text())["traces"]["scored"]["miss_percent"]) == ["saf", "lru"]


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_plot(trace_file: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    options = ["--policy", "lru", "--policy", "belady", "--plot", str(tmp_path / name), "--log"]
    result = RUNNER.invoke(app, ["policy", str(trace_file), *options])
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "mru"], "got policies ['mru']; need names among"),
        (["--rows", "1"], "got a region of 1 rows; need 6"),
        (["--rows", "many"], "got rows 'many'; need"),
        (["--host-only"], "got a trace without `host`; need"),
        (["--policy", "saf"], "got a trace without scores; need"),
    ],
)
def test_errors(trace_file: Path, options: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["policy", str(trace_file), *options], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_no_trace(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    result = RUNNER.invoke(app, ["policy", str(tmp_path / "x.npy")], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert "got no npz archive" in result.output
