"""Words that CUDA streams raise and wait for, across processes and devices, without a CPU in between.

Stream memory operations rather than IPC events: waiting for an event that has not been recorded yet does not
wait, and one that is recorded again meanwhile makes a late waiter wait for more than was meant, which two
ranks can do to each other for ever. A word that only rises has neither problem, and needs no device of the
other rank to be visible.
"""

import ctypes
from functools import cache

import torch

from .turns import WORD_BYTES, OrderLostError

__all__ = ["StreamWords"]

WAIT_GREATER_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
WRITE_BEHIND_FENCE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes are visible to the system first


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue64_v2", "cuStreamWaitValue64_v2"):
        getattr(library, name).argtypes = (
            ctypes.c_void_p,  # stream
            ctypes.c_uint64,  # device address
            ctypes.c_uint64,  # value
            ctypes.c_uint,  # flags
        )
        getattr(library, name).restype = ctypes.c_int
    return library


class StreamWords:
    """`Words` of the current stream, in registered host memory at `address` (8-byte aligned)."""

    def __init__(self, address: int) -> None:
        self._address = address

    def store(self, word: int, value: int) -> None:
        """See `Words`."""
        self._call("cuStreamWriteValue64_v2", word, value, WRITE_BEHIND_FENCE)

    def wait(self, word: int, value: int) -> None:
        """See `Words`."""
        self._call("cuStreamWaitValue64_v2", word, value, WAIT_GREATER_EQUAL)

    def _call(self, function: str, word: int, value: int, flags: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        error = getattr(_driver(), function)(stream, self._address + word * WORD_BYTES, value, flags)
        if error != 0:
            raise OrderLostError(
                f"got CUDA error {error} from {function}; need stream memory operations, which ranks order "
                "their reads of the shared host pool with"
            )
