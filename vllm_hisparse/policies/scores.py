"""Policies that ask the indexer what it thinks of the rows in the region. They need a trace with scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_hisparse.policies.base import Events, Indices, RankedPolicy
from vllm_hisparse.traces import Trace

__all__ = ["LowestScore", "Saf"]

FIXED_POINT = 1 << 20
AGE_WEIGHT = 0.4
USE_WEIGHT = 0.2


class LowestScore(RankedPolicy):
    """The row that the indexer scores lowest at this step."""

    name = "score"
    needs_scores = True

    def rank(self, step: int, position_of: Indices) -> NDArray[np.float64]:
        return _ordered(self._score(step, position_of), position_of)

    def _score(self, step: int, position_of: Indices) -> NDArray[np.float64]:
        """Below the step's threshold by so many nats, [streams, rows]."""
        assert self.trace.scores is not None and self.trace.threshold is not None
        scores = np.take_along_axis(self.trace.scores[:, step], position_of, 1)
        difference: NDArray[np.float64] = scores.astype(np.float64) - self.trace.threshold[:, step, None]
        return difference


class Saf(LowestScore):
    """Score, age and frequency: score - 0.4 log2(1 + age) + 0.2 log2(1 + uses), kept a slot.

    Age is in steps since the last use; uses count from the load on.
    """

    name = "saf"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._last = np.zeros(self.shape, dtype=np.int64)
        self._uses = np.zeros(self.shape, dtype=np.int64)

    def hit(self, step: int, rows: Events) -> None:
        self._last[rows.stream, rows.slot] = step
        self._uses[rows.stream, rows.slot] += 1

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        self._last[rows.stream, rows.slot] = step
        self._uses[rows.stream, rows.slot] = 1

    def rank(self, step: int, position_of: Indices) -> NDArray[np.float64]:
        value = self._score(step, position_of) - AGE_WEIGHT * np.log2(1.0 + step - self._last)
        return _ordered(value + USE_WEIGHT * np.log2(1.0 + self._uses), position_of)


def _ordered(value: NDArray[np.float64], position_of: Indices) -> NDArray[np.float64]:
    """Values in fixed point from 0 on; those of empty slots do not matter and may be anything."""
    value = np.where(position_of < 0, 0.0, value)
    rank: NDArray[np.float64] = (value - value.min()) * FIXED_POINT
    return rank
