"""Memory that is pinned in the background: all of it, or given back, whenever somebody changes their mind."""

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_hisparse.runtime import pinning
from vllm_hisparse.runtime.pinning import Pinning

PIECE = 1 << 16
NUM_PIECES = 64


class Driver:
    """Stands in for the CUDA runtime."""

    def __init__(self) -> None:
        self.order: list[int] = []  # addresses
        self.registered: dict[int, int] = {}
        self.full_after = NUM_PIECES
        self.gate = threading.Event()
        self.gate.set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.order.append(address)
        self.gate.wait()
        if len(self.order) > self.full_after:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for name, stand_in in {
        "cudart": lambda: made,
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
    return made


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(NUM_PIECES * PIECE - 100, dtype=torch.uint8)


def test_all_of_it_and_back(driver: Driver, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(pinning.logger, "info", lambda text, *values: lines.append(text % values))
    pinned = Pinning(memory)
    pinned.wait()
    start = memory.data_ptr()
    assert sorted(driver.registered) == [start + i * PIECE for i in range(NUM_PIECES)]
    assert sum(driver.registered.values()) == memory.numel()
    assert len(lines) == 1 and lines[0].startswith("HiSparse: host pool of 0.00 GiB pinned in ")
    assert pinned.undo()
    assert driver.registered == {}
    assert not pinned.undo()


def test_nobody_waits_for_it(driver: Driver, memory: torch.Tensor) -> None:
    driver.gate.clear()
    pinned = Pinning(memory)
    assert not driver.registered
    driver.gate.set()
    pinned.wait()
    pinned.undo()


def test_given_back_while_it_is_pinned(driver: Driver, memory: torch.Tensor) -> None:
    """No piece is begun any more; those that are, are waited for."""
    driver.gate.clear()
    pinned = Pinning(memory)
    undo = threading.Thread(target=pinned.undo)
    undo.start()
    pinned._stop.wait()
    driver.gate.set()
    undo.join()
    assert len(driver.order) <= pinning.NUM_THREADS
    assert driver.registered == {}


def test_a_piece_that_cannot_be_pinned(driver: Driver, memory: torch.Tensor) -> None:
    driver.full_after = 3
    pinned = Pinning(memory)
    with pytest.raises(RuntimeError, match=r"got CUDA error 2 for pinning .*; need a higher limit of locked"):
        pinned.wait()
    pinned.undo()
    assert driver.registered == {}


def test_ranks_begin_with_pieces_of_their_own(
    driver: Driver, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "NUM_THREADS", 1)
    pinned = Pinning(memory, rank=1, num_ranks=2)
    pinned.wait()
    pieces = [(address - memory.data_ptr()) // PIECE for address in driver.order]
    assert pieces == [*range(1, NUM_PIECES, 2), *range(0, NUM_PIECES, 2)]
    pinned.undo()


def test_its_pages_are_there(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps, the last one shorter, and to the end of the piece."""
    calls: list[tuple[int, int]] = []

    class Library:
        def madvise(self, address: Any, size: Any, advice: int) -> None:
            calls.append((address.value, size.value))

    monkeypatch.setattr(pinning.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(pinning, "POPULATE_BYTES", PIECE // 3)
    memory = torch.zeros(PIECE, dtype=torch.uint8)
    pinned = Pinning(memory)
    pinned.wait()
    pinned.undo()
    ends = [address + size for address, size in calls]
    assert [address for address, _ in calls] == [memory.data_ptr(), *ends[:-1]]
    assert ends[-1] == memory.data_ptr() + PIECE
