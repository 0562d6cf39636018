"""The host pool's memory: shared by the ranks of a node, pinned on CUDA, kept while the process lives."""

import mmap
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from vllm.logger import init_logger

from vllm_hisparse.config import GIB

from .available import available_bytes
from .host_sharing import map_private, map_shared
from .pinning import Pinning
from .stream_words import StreamWords
from .turns import PolledWords, WriteTurns

__all__ = ["HostMemory", "begin_host_memory", "host_memory", "release_host_memory", "wait_for_host_memory"]

logger = init_logger("vllm.vllm_hisparse")
_kept: "HostMemory | None" = None


def begin_host_memory(
    num_bytes: int, pinned: bool, group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Begin to take the process's host pool, before it is known how much of it will be in whole blocks; one
    for the ranks of `group` that are on one node. Returns a call that gives it back if it is still what was
    begun here and nobody has asked for it.

    A collective call for `group`. It pins in the background: until `wait_for_host_memory`. Raises ValueError
    if the machine does not have the memory, before any of it is taken.
    """
    global _kept
    if _kept is None or (_kept.num_bytes, _kept.pinned) != (num_bytes, pinned):
        release_host_memory()
        _kept = HostMemory(num_bytes, pinned, group)
    memory = _kept
    memory.lent_bytes = None
    memory.num_begun += 1
    number = memory.num_begun

    def give_back() -> None:
        if _kept is memory and memory.lent_bytes is None and memory.num_begun == number:
            release_host_memory()

    return give_back


def wait_for_host_memory() -> None:
    """Until the pool that was begun is there. Raises RuntimeError with the driver's reason if it cannot be
    pinned; then all of it has been given back.
    """
    assert _kept is not None, "no host pool was begun"
    try:
        _kept.wait()
    except BaseException:
        release_host_memory()
        raise


def host_memory(num_bytes: int, pinned: bool, group: dist.ProcessGroup | None = None) -> "HostMemory":
    """The process's host pool of this size or, once it was begun, a little more; zeroed when it was made.

    A collective call for `group`. vLLM allocates caches twice when it measures graphs; pinning the pool once
    is enough. Raises what `begin_host_memory` and `wait_for_host_memory` do.
    """
    if _kept is None or not _kept.fits(num_bytes, pinned):
        begin_host_memory(num_bytes, pinned, group)
    wait_for_host_memory()
    assert _kept is not None
    _kept.lent_bytes = num_bytes
    return _kept


def release_host_memory() -> None:
    """The engine ends: give the process's host pool back, and say so: hundreds of GiB take seconds."""
    global _kept
    if _kept is not None:
        memory, _kept = _kept, None
        memory.close()


def _check_available(num_bytes: int) -> None:
    if num_bytes > (free := available_bytes()):
        raise ValueError(
            f"got a host pool of {num_bytes / GIB:.2f} GiB and {free / GIB:.2f} GiB of memory; "
            "need a smaller host_pool_gib or more memory because the pool is never swapped"
        )


class HostMemory:
    """Memory without a name, as `tensor` uint8 [num_bytes], and `turns`, the order in which it is written:
    both to be used once `wait` has returned.

    Owns its mapping, and the registration of it; `close` gives both back. The memory itself is gone when the
    last rank's mapping is.
    """

    def __init__(self, num_bytes: int, pinned: bool, group: dist.ProcessGroup | None = None) -> None:
        self.num_bytes = num_bytes
        self.pinned = pinned
        self.lent_bytes: int | None = None  # None: it was begun, and nobody has asked for it yet
        self.num_begun = 0  # by engines one after the other, if it is as large for each
        self._words_at = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

        def size(num_ranks: int) -> int:
            return self._words_at + WriteTurns.num_bytes(num_ranks) if num_ranks > 1 else num_bytes

        if group is None:
            _check_available(num_bytes)
            self._shared = map_private(num_bytes)
        else:
            self._shared = map_shared(group, size, lambda: _check_available(num_bytes))
        with suppress(OSError):  # of a kernel built without huge pages
            self._shared.map.madvise(mmap.MADV_HUGEPAGE)
        self._all = torch.frombuffer(self._shared.map, dtype=torch.uint8)
        self.tensor = self._all[:num_bytes]
        self._turns: WriteTurns | None = None
        self._pinning = Pinning(self._all, self._shared.rank, self._shared.num_ranks) if pinned else None

    def fits(self, num_bytes: int, pinned: bool) -> bool:
        """Whether it is what is asked for: what it was lent as or, the first time, not more than there is."""
        is_enough = num_bytes <= self.num_bytes if self.lent_bytes is None else num_bytes == self.lent_bytes
        return is_enough and pinned == self.pinned

    def wait(self) -> None:
        """Until the memory can be used. Raises RuntimeError with the driver's reason."""
        if self._pinning is not None:
            self._pinning.wait()
        if self._turns is None:
            self._turns = self._make_turns()

    @property
    def turns(self) -> WriteTurns:
        """Who writes the memory when."""
        assert self._turns is not None, "the host pool was used before it was waited for"
        return self._turns

    def _make_turns(self) -> WriteTurns:
        shared = self._shared
        if shared.num_ranks == 1:
            return WriteTurns()
        if shared.rank == 0:
            size = self.num_bytes / GIB
            logger.info("HiSparse: host pool of %.2f GiB, one for %d ranks", size, shared.num_ranks)
        words = (
            StreamWords(self._all.data_ptr() + self._words_at)
            if self.pinned
            else PolledWords(memoryview(shared.map)[self._words_at :])
        )
        return WriteTurns(shared.rank, shared.num_ranks, words)

    def close(self) -> None:
        """Unregister and release, once the device is done with it. The memory is gone with the last view.

        Also while it is being pinned: within a piece.
        """
        started = time.monotonic()
        was_pinned = self._pinning is not None and self._pinning.undo()
        del self.tensor, self._all, self._shared, self._turns
        done, seconds = "unpinned and freed" if was_pinned else "freed", time.monotonic() - started
        logger.info("HiSparse: host pool of %.2f GiB %s in %.1f s", self.num_bytes / GIB, done, seconds)
