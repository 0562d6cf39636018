"""The host pool's memory: shared by the ranks of a node, on CUDA registered with the driver in parallel
pieces, kept while the process lives.
"""

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
import torch.distributed as dist
from vllm.logger import init_logger

from .available import available_bytes
from .host_sharing import map_private, map_shared
from .stream_words import StreamWords
from .turns import PolledWords, WriteTurns

__all__ = ["HostMemory", "host_memory", "release_host_memory"]

logger = init_logger("vllm.vllm_hisparse")
GIB = 2**30
PIECE_BYTES = GIB
NUM_THREADS = 16
MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python has no name for it
REPORT_EVERY_S = 2.0
_kept: dict[tuple[int, bool], "HostMemory"] = {}


def host_memory(num_bytes: int, pinned: bool, group: dist.ProcessGroup | None = None) -> "HostMemory":
    """The process's host pool of this size, zeroed when it was made; one for the ranks of `group` that are on
    one node.

    A collective call for `group`. vLLM allocates caches twice when it measures graphs; registering the pool
    once is enough. Raises ValueError if the machine does not have the memory, before any of it is taken.
    """
    key = (num_bytes, pinned)
    if key not in _kept:
        for other in _kept.values():
            other.close()
        _kept.clear()
        _kept[key] = HostMemory(num_bytes, pinned, group)
    return _kept[key]


def release_host_memory() -> None:
    """The engine ends: give the process's host pool back, and say so: hundreds of GiB take seconds."""
    for memory in _kept.values():
        memory.close()
    _kept.clear()


def _check_available(num_bytes: int) -> None:
    if num_bytes > (free := available_bytes()):
        raise ValueError(
            f"got a host pool of {num_bytes / GIB:.2f} GiB and {free / GIB:.2f} GiB of memory; "
            "need a smaller host_pool_gib or more memory because the pool is never swapped"
        )


class HostMemory:
    """Memory without a name, as `tensor` uint8 [num_bytes], and `turns`, the order in which it is written.

    Owns its mapping, and the registration of it; `close` gives both back. The memory itself is gone when the
    last rank's mapping is.
    """

    def __init__(self, num_bytes: int, pinned: bool, group: dist.ProcessGroup | None = None) -> None:
        words_at = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

        def size(num_ranks: int) -> int:
            return words_at + WriteTurns.num_bytes(num_ranks) if num_ranks > 1 else num_bytes

        if group is None:
            _check_available(num_bytes)
            shared = map_private(num_bytes)
        else:
            shared = map_shared(group, size, lambda: _check_available(num_bytes))
        with suppress(OSError):  # of a kernel built without huge pages
            shared.map.madvise(mmap.MADV_HUGEPAGE)
        self._all = torch.frombuffer(shared.map, dtype=torch.uint8)
        self.tensor = self._all[:num_bytes]
        self._registered: list[int] = []
        if pinned:
            self._register(shared.rank, shared.num_ranks)
        self.turns = WriteTurns()
        if shared.num_ranks > 1:
            if shared.rank == 0:
                logger.info(
                    "HiSparse: host pool of %.2f GiB, one for %d ranks", num_bytes / GIB, shared.num_ranks
                )
            words = (
                StreamWords(self._all.data_ptr() + words_at)
                if pinned
                else PolledWords(memoryview(shared.map)[words_at:])
            )
            self.turns = WriteTurns(shared.rank, shared.num_ranks, words)

    def _register(self, rank: int, num_ranks: int) -> None:
        """Take the memory and register it with the driver, many pieces at a time.

        Whoever takes a piece first gets it close to that rank's CPU. Ranks begin with pieces of their own,
        which spreads the pool over the node and is done sooner.
        Raises RuntimeError with the driver's reason.
        """
        started = reported = time.monotonic()
        total = self._all.numel()
        all_starts = range(0, total, PIECE_BYTES)
        starts = [
            s for first in range(num_ranks) for s in all_starts[(rank + first) % num_ranks :: num_ranks]
        ]
        device = torch.cuda.current_device()
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for done, address in enumerate(pool.map(lambda s: self._register_piece(s, device), starts), 1):
                self._registered.append(address)
                if time.monotonic() - reported > REPORT_EVERY_S:
                    reported = time.monotonic()
                    logger.info("HiSparse: host pool %d of %d GiB pinned", done, len(starts))
        logger.info(
            "HiSparse: host pool of %.2f GiB pinned in %.1f s", total / GIB, time.monotonic() - started
        )

    def _register_piece(self, start: int, device: int) -> int:
        torch.cuda.set_device(device)
        size = min(PIECE_BYTES, self._all.numel() - start)
        address = self._all.data_ptr() + start
        # The kernel takes the pages of several threads at a time here; in the registration, one by one. Where
        # it does not know the request, the registration has to.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            raise RuntimeError(
                f"got CUDA error {int(error)} for pinning {size} bytes of the host pool; need a higher limit "
                "of locked memory (ulimit -l), or a smaller host_pool_gib"
            )
        return address

    def close(self) -> None:
        """Unregister and release, once the device is done with it. The memory is gone with the last view."""
        started, size, pinned = time.monotonic(), self.tensor.numel() / GIB, bool(self._registered)
        if pinned:
            self._unregister()
        del self.tensor, self._all, self.turns
        done = "unpinned and freed" if pinned else "freed"
        logger.info("HiSparse: host pool of %.2f GiB %s in %.1f s", size, done, time.monotonic() - started)

    def _unregister(self) -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # a device that has failed reads nothing any more
            logger.warning("HiSparse: the host pool is unpinned after an error of the device: %s", error)
        unregister = torch.cuda.cudart().cudaHostUnregister  # type: ignore[no-untyped-call]
        try:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                list(pool.map(unregister, self._registered))
        except RuntimeError:  # at Python's exit, which starts no threads any more
            for address in self._registered:
                unregister(address)
        self._registered.clear()
