"""The bound: what a policy that knows the future would do."""

from __future__ import annotations

import numpy as np

from vllm_hisparse.policies.base import Events, Indices, RankedPolicy
from vllm_hisparse.traces import Trace

__all__ = ["Belady", "next_uses"]


class Belady(RankedPolicy):
    """The row whose next use is farthest gives way: no policy misses less (Belady 1966)."""

    name = "belady"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._next_of_entry = next_uses(trace)
        self._next = np.zeros(self.shape, dtype=np.int64)

    def hit(self, step: int, rows: Events) -> None:
        self._next[rows.stream, rows.slot] = self._next_of_entry[rows.stream, step, rows.entry]

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        self.hit(step, rows)

    def rank(self, step: int, position_of: Indices) -> Indices:
        return self.trace.num_steps - self._next


def next_uses(trace: Trace) -> Indices:
    """The next step that selects the same position, [streams, steps, k]; the number of steps if none does."""
    streams, steps = trace.top.shape[:2]
    result = np.full(trace.top.shape, steps, dtype=np.int64)
    later = np.full((streams, trace.num_positions + 1), steps, dtype=np.int64)  # the last is padding's
    stream = np.arange(streams)[:, None]
    for step in reversed(range(steps)):
        top = trace.top[:, step]
        result[:, step] = later[stream, top]
        later[stream, top] = step
    return result
