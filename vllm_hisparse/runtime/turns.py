"""Order between the ranks of a node, which read one host pool that one of them writes.

MLA's rows are the same on every rank of a replica, so one copy of a page is enough. Two things could go
wrong.

*A rank reads a page before it is written.* Pages are read from the host once every rank has acknowledged
their copy as completed, and the writer acknowledges after it has written. Earlier reads happen only where a
page's device blocks were reused while the copy ran; then the step's message names the transfer, every rank's
compute stream waits for the end of its own part of it, and a reader's part ends behind the writer's.

*The writer overwrites rows that a rank still reads.* A host block is handed out again once no request leases
it, so whatever reads it was submitted before, in an earlier step: forwards, and copies back to the device. A
rank's part of a transfer begins behind all of these, and the writer copies when every rank's part has begun.

Nobody waits for ever: parts come in the same order on every rank, because messages do, and the n-th waits
only for others' n-th parts to have begun, which wait for nothing later than the (n-1)-th.

*Enqueued* says what it did with a pool for every rank. Readers copy nothing from the device, so their blocks
are safe to reuse at any time; the writer's are once its copy is on its stream.
"""

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["WORD_BYTES", "OrderLostError", "PolledWords", "Words", "WriteTurns"]

WORD_BYTES = 64  # apart, so that no two ranks write to one cache line
POLL_S = 20e-6


class OrderLostError(Exception):
    """A rank cannot tell the others where it is: nothing they read from the pool can be trusted any more."""


class Words(Protocol):
    """64-bit words that the ranks of a node share, 0 at first. A word has one rank that raises it.

    Methods raise OrderLostError.
    """

    def store(self, word: int, value: int) -> None:
        """Raise `word` to `value`, behind everything submitted before."""

    def wait(self, word: int, value: int) -> None:
        """Hold back what is submitted afterwards until `word` is at least `value`."""


class PolledWords:
    """Words for ranks on the CPU, where whatever was submitted has been done. `wait` blocks the caller.

    Stores become visible in order: x86-64 keeps it, and CPython stores an aligned item at once.
    """

    def __init__(self, memory: memoryview) -> None:
        self._items = memory.cast("q")

    def store(self, word: int, value: int) -> None:
        """See `Words`."""
        self._items[word * WORD_BYTES // 8] = value

    def wait(self, word: int, value: int) -> None:
        """See `Words`."""
        while self._items[word * WORD_BYTES // 8] < value:
            time.sleep(POLL_S)


class WriteTurns:
    """One rank's view of the turns in which a pool is written. Rank 0 of the node writes."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, words: Words | None = None) -> None:
        """`words`: first how many parts rank 0 has written, then for each rank how many it has begun."""
        assert words is not None or num_ranks == 1
        self.num_ranks = num_ranks
        self.is_writer = rank == 0
        self._rank = rank
        self._words = words
        self._turn = 0
        if words is not None:
            words.store(1 + rank, 0)  # words that do not work are an error at start-up

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Shared memory that the words take."""
        return (1 + num_ranks) * WORD_BYTES

    def begin(self) -> None:
        """The next turn. Once for each message that writes, before anything of it can fail."""
        self._turn += 1

    def take(self, write: Callable[[], None]) -> None:
        """This rank's part of the turn: `write` on rank 0, once all may be overwritten; the end of it on the
        others.

        On the current stream. If `write` raises, so does this; the others pass all the same, and leave the
        pages where they are when they are told.
        """
        if self._words is None:
            write()
            return
        self._words.store(1 + self._rank, self._turn)
        if not self.is_writer:
            self._words.wait(0, self._turn)
            return
        for rank in range(1, self.num_ranks):
            self._words.wait(1 + rank, self._turn)
        try:
            write()
        finally:
            self._words.store(0, self._turn)
