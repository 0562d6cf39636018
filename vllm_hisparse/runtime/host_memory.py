"""The host pool's memory: on CUDA registered with the driver in parallel pieces, kept while the process
lives.
"""

import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from vllm.logger import init_logger

from .available import available_bytes

__all__ = ["HostMemory", "host_memory"]

logger = init_logger("vllm.vllm_hisparse")
GIB = 2**30
PIECE_BYTES = GIB
NUM_THREADS = 8
REPORT_EVERY_S = 2.0
_kept: dict[tuple[int, bool], "HostMemory"] = {}


def host_memory(num_bytes: int, pinned: bool) -> "HostMemory":
    """The process's host pool of this size, zeroed when it was made.

    vLLM allocates caches twice when it measures graphs; registering the pool once is enough. Raises
    ValueError if the machine does not have the memory, before any of it is taken.
    """
    key = (num_bytes, pinned)
    if key not in _kept:
        for other in _kept.values():
            other.close()
        _kept.clear()
        _kept[key] = HostMemory(num_bytes, pinned)
    return _kept[key]


class HostMemory:
    """Anonymous memory of `num_bytes`, as `tensor` uint8 [num_bytes]. Owns it; `close` gives it back."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        if num_bytes > (free := available_bytes()):
            raise ValueError(
                f"got a host pool of {num_bytes / GIB:.2f} GiB and {free / GIB:.2f} GiB of memory; "
                "need a smaller host_pool_gib or more memory because the pool is never swapped"
            )
        self._map = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registered: list[int] = []
        if pinned:
            self._register()

    def _register(self) -> None:
        """Register all pieces with the driver, a few at a time.

        Raises RuntimeError with the driver's reason.
        """
        started = reported = time.monotonic()
        total = self.tensor.numel()
        starts = range(0, total, PIECE_BYTES)
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
        size = min(PIECE_BYTES, self.tensor.numel() - start)
        address = self.tensor.data_ptr() + start
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            raise RuntimeError(
                f"got CUDA error {int(error)} for pinning {size} bytes of the host pool; need a higher limit "
                "of locked memory (ulimit -l), or a smaller host_pool_gib"
            )
        return address

    def close(self) -> None:
        """Unregister and release. Views of `tensor` must be gone by then."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._registered.clear()
        del self.tensor
