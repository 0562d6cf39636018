"""The command line: subcommands, benchmarks of the source tree, versions."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.interrupts import Program, program
from vllm_hisparse.cli import bench
from vllm_hisparse.cli.main import app

__all__ = ["program"]

RUNNER = CliRunner()
SCRIPT = """
import argparse, sys, time
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--rows", type=int)
    args = parser.parse_args()
    if args.wait:
        try:
            print("waits", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(1)  # somebody's engines have to be ended
            sys.exit(5)
    sys.exit(3 if args.rows == 5 else 4)
"""
STARTED_BY_IT = """
import sys
if __name__ == "__main__":
    sys.exit(int(sys.argv[1]))
"""
# `vllm-hisparse` with other benchmarks: their folder, then arguments.
WITH_SCRIPTS = """
import sys
from pathlib import Path
from vllm_hisparse.cli import bench
from vllm_hisparse.cli.__main__ import main
bench.SCRIPTS = Path(sys.argv.pop(1))
main()
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a benchmark, a module that benchmarks share, and a program that one of them starts."""
    (tmp_path / "quick.py").write_text(SCRIPT)
    (tmp_path / "common.py").write_text("X = 1\n")
    (tmp_path / "worker.py").write_text(STARTED_BY_IT)
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
    command = [sys.executable, "-c", WITH_SCRIPTS, str(scripts), "bench", "quick"]
    assert subprocess.run([*command, "--rows", "5"], check=False).returncode == 3
    assert subprocess.run(command, check=False).returncode == 4


def test_a_benchmark_ends_by_itself_after_ctrl_c(scripts: Path, program: Callable[..., Program]) -> None:
    bench = program(sys.executable, "-c", WITH_SCRIPTS, scripts, "bench", "quick", "--wait")
    bench.wait_for(lambda: "waits" in bench.output)
    assert bench.interrupt() == 5
    bench.check_nothing_left()


def test_bench_refuses_names_that_are_none(scripts: Path) -> None:
    result = RUNNER.invoke(app, ["bench", "common"])
    assert result.exit_code == 2
    assert "need one of quick" in result.output


def test_bench_needs_a_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SCRIPTS", tmp_path / "nowhere")
    result = RUNNER.invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "need a source tree" in result.output
