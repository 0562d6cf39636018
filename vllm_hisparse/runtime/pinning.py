"""Registration of host memory with the CUDA driver, many pieces at a time, beside all else in the process."""

import ctypes
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event, Lock

import torch
from vllm.logger import init_logger

from vllm_hisparse.config import GIB

__all__ = ["Pinning"]

logger = init_logger("vllm.vllm_hisparse")
PIECE_BYTES = GIB
# Whoever maps memory, for a library or a file of weights, waits for the calls in progress, and they hold up
# those after them: for 64 MiB that is a hundredth of a second, for a whole piece as long as it takes.
POPULATE_BYTES = 1 << 26
NUM_THREADS = 16
MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python has no name for it
REPORT_EVERY_S = 2.0


class Pinning:
    """Memory on its way to being pinned: taken from the kernel and registered for the current device.

    `memory` uint8 [bytes]. Owns its threads and what they have registered; whoever owns the memory calls
    `undo` before it goes.
    """

    def __init__(self, memory: torch.Tensor, rank: int = 0, num_ranks: int = 1) -> None:
        """Begin. Whoever takes a piece first gets it close to that rank's CPU. Ranks that share the memory
        begin with pieces of their own, which spreads it over the node and is done sooner.
        """
        self._address = memory.data_ptr()
        self._num_bytes = memory.numel()
        self._begun = self._reported = time.monotonic()
        self._stop = Event()
        self._lock = Lock()  # of what follows
        self._registered: list[int] = []  # addresses
        starts = range(0, self._num_bytes, PIECE_BYTES)
        order = [s for first in range(num_ranks) for s in starts[(rank + first) % num_ranks :: num_ranks]]
        self._num_pieces = len(order)
        device = torch.cuda.current_device()
        threads = ThreadPoolExecutor(NUM_THREADS)
        self._pieces: list[Future[None]] = [threads.submit(self._pin, start, device) for start in order]
        threads.shutdown(wait=False)  # they end with the last piece

    def wait(self) -> None:
        """Until all of it is pinned. Raises RuntimeError with the driver's reason if some cannot be."""
        for piece in self._pieces:
            piece.result()

    def undo(self) -> bool:
        """Begin no further piece, and unregister those that are, once the device is done with them.

        Returns whether there were any. Idempotent.
        """
        self._stop.set()
        wait(self._pieces)
        if not self._registered:
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # a device that has failed reads nothing any more
            logger.warning("HiSparse: the host pool is unpinned after an error of the device: %s", error)
        unregister = torch.cuda.cudart().cudaHostUnregister  # type: ignore[no-untyped-call]
        try:
            with ThreadPoolExecutor(NUM_THREADS) as threads:
                list(threads.map(unregister, self._registered))
        except RuntimeError:  # at Python's exit, which starts no threads any more
            for address in self._registered:
                unregister(address)
        self._registered.clear()
        return True

    def _pin(self, start: int, device: int) -> None:
        torch.cuda.set_device(device)
        size = min(PIECE_BYTES, self._num_bytes - start)
        if not self._populate(start, size):
            return
        address = self._address + start
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        if int(error) != 0:
            self._stop.set()
            raise RuntimeError(
                f"got CUDA error {int(error)} for pinning {size} bytes of the host pool; need a higher limit "
                "of locked memory (ulimit -l), or a smaller host_pool_gib"
            )
        with self._lock:
            self._registered.append(address)
            self._report()

    def _populate(self, start: int, size: int) -> bool:
        """False if nobody wants the memory any more.

        The kernel takes the pages of several threads at a time here; in the registration, one by one. Where
        it does not know the request, the registration has to.
        """
        madvise = ctypes.CDLL(None).madvise
        for at in range(start, start + size, POPULATE_BYTES):
            if self._stop.is_set():
                return False
            length = min(POPULATE_BYTES, start + size - at)
            madvise(ctypes.c_void_p(self._address + at), ctypes.c_size_t(length), MADV_POPULATE_WRITE)
        return not self._stop.is_set()

    def _report(self) -> None:
        now, done = time.monotonic(), len(self._registered)
        if done == self._num_pieces:
            size = self._num_bytes / GIB
            logger.info("HiSparse: host pool of %.2f GiB pinned in %.1f s", size, now - self._begun)
        elif now - self._reported > REPORT_EVERY_S:
            self._reported = now
            logger.info("HiSparse: host pool %d of %d GiB pinned", done, self._num_pieces)
