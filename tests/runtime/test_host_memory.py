"""The host pool of a process: made once, given back once, and said so."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_hisparse.runtime import host_memory as module
from vllm_hisparse.runtime.host_memory import host_memory, release_host_memory

BYTES = 1 << 20


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    kept: list[str] = []

    def keep(text: str, *arguments: Any) -> None:
        kept.append(text % arguments)

    monkeypatch.setattr(module.logger, "info", keep)
    return kept


def test_made_once_and_given_back_once(lines: list[str]) -> None:
    release_host_memory()  # of engines before
    lines.clear()
    first = host_memory(BYTES, pinned=False)
    view = first.tensor[:4].fill_(7)
    assert host_memory(BYTES, pinned=False) is first
    release_host_memory()
    release_host_memory()
    assert len(lines) == 1 and lines[0].startswith("HiSparse: host pool of 0.00 GiB freed in ")
    assert view.tolist() == [7] * 4, "views stay valid as long as they are there"
    assert host_memory(BYTES, pinned=False).tensor.sum() == 0
    release_host_memory()


def test_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"got a host pool of .* GiB and .* GiB of memory; need a smaller"):
        host_memory(1 << 50, pinned=False)


def test_one_rank_has_memory_of_its_own() -> None:
    """Huge pages where the kernel has them, and no copies for processes that are forked."""
    memory = host_memory(64 << 20, pinned=False)
    try:
        at = f"{memory.tensor.data_ptr():x}-"
        _, _, entry = Path("/proc/self/smaps").read_text().partition(f"\n{at}")
        if "VmFlags:" not in entry:
            pytest.skip("this kernel does not show flags of mappings")
        flags = entry.split("VmFlags:")[1].splitlines()[0].split()
        assert "dc" in flags and "sh" not in flags
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            assert "hg" in flags
    finally:
        release_host_memory()


AT_EXIT = """
import atexit, torch
from vllm_hisparse.runtime import pinning
from vllm_hisparse.runtime.host_memory import host_memory, release_host_memory

class Runtime:  # stands in for the driver
    def cudaHostRegister(self, address, size, flags):
        return 0

    def cudaHostUnregister(self, address):
        print("unpinned", size.index(address - start))

torch.cuda.synchronize, torch.cuda.cudart = (lambda: None), Runtime
torch.cuda.current_device, torch.cuda.set_device = (lambda: 0), (lambda device: None)
pinning.PIECE_BYTES = 1 << 19
start, size = host_memory(1 << 20, pinned=True).tensor.data_ptr(), [0, 1 << 19]
atexit.register(release_host_memory)
"""


def test_given_back_at_exit() -> None:
    """By then Python starts no threads."""
    result = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("unpinned ")]
    assert sorted(lines) == ["unpinned 0", "unpinned 1"]
    assert "Traceback" not in result.stderr
