"""Two processes on CUDA that share a host pool: streams wait for each other, and for nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.processes import environment

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("shared_pool.py")
LIMIT_S = 120


def wrong_reads(folder: Path, deaf: int = -1) -> list[int]:
    """Of each rank. They run on two GPUs where there are two."""
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(folder), str(deaf)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for rank in range(2)
    ]
    try:
        return [int(rank.communicate(timeout=LIMIT_S)[0].split()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_every_read_sees_what_was_written_last(tmp_path: Path) -> None:
    assert wrong_reads(tmp_path) == [0, 0]


@pytest.mark.parametrize("deaf", [0, 1], ids=["writer-does-not-wait", "reader-does-not-wait"])
def test_without_a_wait_reads_are_wrong(deaf: int, tmp_path: Path) -> None:
    assert wrong_reads(tmp_path, deaf)[1] > 0
