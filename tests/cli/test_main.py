"""The command line: subcommands, benchmarks of the source tree, versions."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_hisparse.cli import bench
from vllm_hisparse.cli.main import app

RUNNER = CliRunner()
SCRIPT = """
import sys
if __name__ == "__main__":
    sys.exit(3 if sys.argv[1:] == ["--rows", "5"] else 4)
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a benchmark and a module that benchmarks share."""
    (tmp_path / "quick.py").write_text(SCRIPT)
    (tmp_path / "common.py").write_text("X = 1\n")
    monkeypatch.setattr(bench, "SCRIPTS", tmp_path)
    return tmp_path


def test_help_names_the_subcommands() -> None:
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("demo", "bench", "version"):
        assert name in result.output


def test_the_command_line_starts_without_torch_and_vllm() -> None:
    code = "import sys, vllm_hisparse.cli.main; sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version_names_what_is_installed() -> None:
    result = RUNNER.invoke(app, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith("vllm-hisparse ")
    assert "torch 2." in result.output


def test_bench_lists_scripts_only(scripts: Path) -> None:
    result = RUNNER.invoke(app, ["bench"])
    assert result.output.split() == ["quick"]


def test_bench_passes_options_and_exit_code_on(scripts: Path) -> None:
    assert RUNNER.invoke(app, ["bench", "quick", "--rows", "5"]).exit_code == 3
    assert RUNNER.invoke(app, ["bench", "quick"]).exit_code == 4


def test_bench_refuses_names_that_are_none(scripts: Path) -> None:
    result = RUNNER.invoke(app, ["bench", "common"])
    assert result.exit_code == 2
    assert "need one of quick" in result.output


def test_bench_needs_a_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SCRIPTS", tmp_path / "nowhere")
    result = RUNNER.invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "need a source tree" in result.output
