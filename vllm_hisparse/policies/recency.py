"""Policies that look at when a row came or was last used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_hisparse.policies.base import Events, Indices, RankedPolicy
from vllm_hisparse.traces import Trace

__all__ = ["Clock", "Fifo", "KeepCurrent", "Lru", "Random"]


class Lru(RankedPolicy):
    """Least recently used; of one step, what it loaded gives way before what it hit."""

    name = "lru"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._key = np.zeros(self.shape, dtype=np.int64)

    def hit(self, step: int, rows: Events) -> None:
        self._key[rows.stream, rows.slot] = 2 * step + 1

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        self._key[rows.stream, rows.slot] = 2 * step

    def rank(self, step: int, position_of: Indices) -> Indices:
        return self._key


class KeepCurrent(Lru):
    """Only the last selection stays: a region of k rows, whatever it may use."""

    name = "keep-current"

    @classmethod
    def region_rows(cls, trace: Trace, rows: int) -> int:
        return int(trace.num_selected.max())


class Fifo(RankedPolicy):
    """What was loaded first gives way first."""

    name = "fifo"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._loaded = np.zeros(self.shape, dtype=np.int64)

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        self._loaded[rows.stream, rows.slot] = step

    def rank(self, step: int, position_of: Indices) -> Indices:
        return self._loaded


class Random(RankedPolicy):
    """Any row, by a generator with a fixed seed."""

    name = "random"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._random = np.random.default_rng(0)

    def rank(self, step: int, position_of: Indices) -> NDArray[np.int64]:
        return self._random.integers(0, 1 << 32, self.shape)


class Clock(RankedPolicy):
    """Second chance: a hand goes round the slots, skips those used since it last passed, and unmarks them."""

    name = "clock"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._used = np.zeros(self.shape, dtype=np.int64)
        self._pinned = np.zeros(self.shape, dtype=bool)
        self._hand = np.zeros((trace.num_streams, 1), dtype=np.int64)

    def hit(self, step: int, rows: Events) -> None:
        self._used[rows.stream, rows.slot] = 1
        self._pinned[:] = False
        self._pinned[rows.stream, rows.slot] = True

    def rank(self, step: int, position_of: Indices) -> Indices:
        # In the order in which the hand reaches them; used slots only in its second round.
        return self._used * self.rows + self._distance()

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        distance = self._distance()
        round_ = self._used[rows.stream, rows.slot]
        reached = np.full(len(self._hand), -1, dtype=np.int64)
        np.maximum.at(reached, rows.stream, round_ * self.rows + distance[rows.stream, rows.slot])
        self._used[(distance <= reached[:, None]) & ~self._pinned] = 0  # the hand leaves pinned rows alone
        self._hand = (self._hand + reached[:, None] + 1) % self.rows

    def _distance(self) -> Indices:
        """Slots that the hand passes before it reaches one, [streams, rows]."""
        return (np.arange(self.rows) - self._hand) % self.rows
