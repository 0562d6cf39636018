"""The engine's default policy as the kernels compute it: LRFU in integers, with ghosts.

Arithmetic and order are those of `ops/reference.py` (policy LRFU), to the bit; a test replays both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_hisparse.policies.base import Events, Indices, RankedPolicy
from vllm_hisparse.traces import Trace

__all__ = ["GAIN", "LrfuKernel"]

BIAS = 128
MAX_AGE = 1023
MAX_GHOST = 32767
# round(16 * log2(1 + 2**(-d / 16))), 0 from d = 89 on
GAIN = np.append(np.round(16 * np.log2(1 + 2 ** (-np.arange(89) / 16))), 0).astype(np.int64)


class LrfuKernel(RankedPolicy):
    """LRFU with a key a slot; an evicted row's key, rounded, is found again when the row comes back."""

    name = "lrfu-kernel"

    def __init__(self, trace: Trace, rows: int) -> None:
        super().__init__(trace, rows)
        self._key = np.zeros(self.shape, dtype=np.int64)
        self._ghost = np.zeros((trace.num_streams, trace.num_positions), dtype=np.int64)
        # Of each stream and step: only steps that ask the region for something count.
        self._clock = (trace.num_selected > 0).cumsum(1)

    def hit(self, step: int, rows: Events) -> None:
        index = rows.stream, rows.slot
        self._key[index] = _touch(self._key[index], self._clock[rows.stream, step])

    def load(self, step: int, rows: Events, evicted: Indices) -> None:
        index = rows.stream, rows.slot
        held = evicted >= 0
        self._ghost[rows.stream[held], evicted[held]] = np.minimum(self._key[index][held] >> 1, MAX_GHOST)
        before = 2 * self._ghost[rows.stream, rows.position]
        self._key[index] = _touch(before, self._clock[rows.stream, step])

    def rank(self, step: int, position_of: Indices) -> Indices:
        age = np.minimum(self._clock[:, step, None] + 2 * BIAS - self._key, MAX_AGE)
        return MAX_AGE - age


def _touch(key: Indices, clock: Indices) -> NDArray[np.int64]:
    """Keys after one more use at `clock`; 0: never used."""
    now = clock + BIAS
    gain = GAIN[np.minimum(np.abs(key - now), len(GAIN) - 1)]
    touched: NDArray[np.int64] = np.maximum(key, now) + gain
    return touched
