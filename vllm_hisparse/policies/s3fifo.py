"""S3-FIFO (Yang et al. 2023): a small queue sieves what is used once, a main queue holds the rest."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from vllm_hisparse.policies.base import Events, Flags, Indices, Policy
from vllm_hisparse.traces import Trace

__all__ = ["S3Fifo"]

SMALL_SHARE = 0.1  # of the region
MAX_USES = 3
PROMOTED_USES = 1  # uses in the small queue that earn a place in the main queue


class S3Fifo(Policy):
    """Small queue, main queue with second chances, and a ghost queue of positions as long as the region."""

    name = "s3-fifo"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._queues = [_Queues(rows) for _ in range(trace.num_streams)]
        self._uses = np.zeros(self.shape, dtype=np.int64)

    def hit(self, step: int, rows: Events) -> None:
        index = rows.stream, rows.slot
        self._uses[index] = np.minimum(self._uses[index] + 1, MAX_USES)

    def evict(self, step: int, count: Indices, pinned: Flags, position_of: Indices) -> Flags:
        chosen = np.zeros(self.shape, dtype=bool)
        for stream in np.flatnonzero(count):
            uses = self._uses[stream].tolist()
            free = np.flatnonzero(position_of[stream] < 0)[: count[stream]].tolist()
            queues, held = self._queues[stream], pinned[stream].tolist()
            victims = [queues.evict(uses, held) for _ in range(int(count[stream]) - len(free))]
            chosen[stream, free + victims] = True
            self._uses[stream] = uses
        return chosen

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        self._uses[rows.stream, rows.slot] = 0
        events = (rows.stream.tolist(), rows.slot.tolist(), rows.position.tolist(), evicted.tolist())
        for stream, slot, position, old in zip(*events, strict=True):
            self._queues[stream].replace(slot, old, position)


class _Queues:
    """The queues of one region, oldest first."""

    def __init__(self, rows: int) -> None:
        self._small: deque[int] = deque()  # slots
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # positions that the small queue let go
        self._sieved: set[int] = set()  # slots that the small queue gave up in this step
        self._small_rows = max(1, int(SMALL_SHARE * rows))
        self._num_ghosts = rows

    def evict(self, uses: list[int], pinned: list[bool]) -> int:
        """Take one slot out of its queue. Changes `uses`."""
        spared = 0  # pinned rows that were met since anything else
        while True:
            small = len(self._small) >= self._small_rows or spared >= len(self._main)
            queue = self._small if small else self._main
            slot = queue.popleft()
            if small and uses[slot] >= PROMOTED_USES:  # a pinned row has been used
                uses[slot] = 0
                self._main.append(slot)
            elif small:
                self._sieved.add(slot)
                return slot
            elif pinned[slot]:
                self._main.append(slot)
                spared += 1
            elif uses[slot]:
                uses[slot] -= 1
                self._main.append(slot)
                spared = 0
            else:
                return slot

    def replace(self, slot: int, old: int, position: int) -> None:
        """`position` takes the slot that `evict` chose. One that came back soon goes to the main queue."""
        if slot in self._sieved:
            self._sieved.remove(slot)
            self._ghosts[old] = None
            if len(self._ghosts) > self._num_ghosts:
                self._ghosts.popitem(last=False)
        known = self._ghosts.pop(position, self) is None
        (self._main if known else self._small).append(slot)
