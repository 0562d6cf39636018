"""Policies that count uses. Counts are kept a position and so outlive an eviction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_hisparse.policies.base import Events, Indices, RankedPolicy
from vllm_hisparse.traces import Trace

__all__ = ["Lfu", "Lrfu"]

HALVING_STEPS = 25
DECAY = 0.95  # of a use's weight, a step
FIXED_POINT = 1 << 20


class Lfu(RankedPolicy):
    """Least frequently used; counts are halved every 25 steps."""

    name = "lfu"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._uses = np.zeros((trace.num_streams, trace.num_positions), dtype=np.float64)

    def hit(self, step: int, rows: Events) -> None:
        if step and step % HALVING_STEPS == 0:
            self._uses /= 2
        self._uses[rows.stream, rows.position] += 1

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        self._uses[rows.stream, rows.position] += 1

    def rank(self, step: int, position_of: Indices) -> NDArray[np.float64]:
        return np.take_along_axis(self._uses, position_of, 1) * FIXED_POINT


class Lrfu(RankedPolicy):
    """A use made d steps ago weighs 0.95**d; the lowest sum gives way (LRFU, Lee et al. 2001).

    Kept as the base-2 logarithm of the sum of 0.95**-t over uses t: that does not change while a row rests.
    """

    name = "lrfu"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._weight = np.full((trace.num_streams, trace.num_positions), -1e9)

    def hit(self, step: int, rows: Events) -> None:
        self._use(step, rows)

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        self._use(step, rows)

    def rank(self, step: int, position_of: Indices) -> NDArray[np.float64]:
        return np.maximum(np.take_along_axis(self._weight, position_of, 1), 0) * FIXED_POINT

    def _use(self, step: int, rows: Events) -> None:
        index = rows.stream, rows.position
        self._weight[index] = np.logaddexp2(self._weight[index], -np.log2(DECAY) * step)
