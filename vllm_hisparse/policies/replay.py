"""Replays a trace through a policy.

The rules: a step's selection is pinned, every missing row is loaded, regions start empty. The row that a step
writes itself is free: it takes a slot when it is selected, but is not counted as a miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_hisparse.policies.base import Events, Policy
from vllm_hisparse.traces import Trace

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """What a policy did with a trace."""

    selected: NDArray[np.int64]  # [streams, steps] distinct positions
    loaded: NDArray[np.int64]  # [streams, steps] rows that were in no slot, the newest included
    newest_loaded: NDArray[np.bool_]  # [streams, steps] whether the newest row was among them

    @property
    def misses(self) -> NDArray[np.int64]:
        """Rows read from the host, [streams, steps]."""
        return self.loaded - self.newest_loaded

    @property
    def miss_percent(self) -> float:
        """Misses a selected row, mean over streams, in percent.

        The first step, which fills the region, is left out.
        """
        selected = self.selected[:, 1:].sum(1)
        misses = self.misses[:, 1:].sum(1)
        used = selected > 0
        return 100 * float(np.mean(misses[used] / selected[used])) if used.any() else 0.0


def replay(trace: Trace, policy: type[Policy], rows: int) -> Replay:
    """Runs every stream of `trace` through `policy` with regions of `rows` slots.

    Raises ValueError if a step selects more positions than the region has slots, or the trace lacks scores.
    """
    selected = trace.num_selected
    rows = policy.region_rows(trace, rows)
    if rows < selected.max():
        raise ValueError(
            f"got a region of {rows} rows; need {int(selected.max())} because a step selects that many and "
            "none of them may give way"
        )
    if policy.needs_scores and trace.scores is None:
        raise ValueError(
            f"got a trace without scores; need them for {policy.name} because it ranks rows by score"
        )
    region = _Regions(trace, policy(trace, rows), rows)
    steps = [region.step(step) for step in range(trace.num_steps)]
    loaded, newest = (np.stack(column, axis=1) for column in zip(*steps, strict=True))
    return Replay(selected, loaded, newest)


class _Regions:
    """Hot regions of all streams: what is in which slot."""

    def __init__(self, trace: Trace, policy: Policy, rows: int) -> None:
        self._policy = policy
        self._newest = trace.newest
        self._top = np.ascontiguousarray(trace.top.swapaxes(0, 1))  # [steps, streams, k]
        self._slot_of = np.full(
            (trace.num_streams, trace.num_positions + 1), -1, np.int64
        )  # the last is padding's
        self._position_of = np.full((trace.num_streams, rows), -1, np.int64)
        self._streams = np.arange(trace.num_streams)[:, None]

    def step(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Rows loaded by each stream, and whether the newest was among them: [streams] each."""
        top = self._top[step]  # [streams, k]; -1 is the last column of slot_of
        slot = self._slot_of[self._streams, top]
        missing = (top >= 0) & (slot < 0)
        stream, entry = np.nonzero(slot >= 0)
        hits = Events(stream, slot[stream, entry], top[stream, entry].astype(np.int64), entry)
        self._policy.hit(step, hits)
        count = missing.sum(1)
        if count.any():
            pinned = np.zeros(self._position_of.shape, dtype=bool)
            pinned[hits.stream, hits.slot] = True
            self._load(step, top, missing, self._policy.evict(step, count, pinned, self._position_of))
        return count, (missing & (top == self._newest[:, step, None])).any(1)

    def _load(
        self, step: int, top: NDArray[np.int32], missing: NDArray[np.bool_], victims: NDArray[np.bool_]
    ) -> None:
        """Give the missing rows, in order of selection, the victims' slots, in ascending order."""
        stream, entry = np.nonzero(missing)
        taken, slot = np.nonzero(victims)
        assert np.array_equal(stream, taken), "a policy gave up too many slots, or too few"
        evicted = self._position_of[stream, slot]
        held = evicted >= 0
        self._slot_of[stream[held], evicted[held]] = -1
        position = top[stream, entry].astype(np.int64)
        self._slot_of[stream, position] = slot
        self._position_of[stream, slot] = position
        self._policy.load(step, Events(stream, slot, position, entry), evicted)
