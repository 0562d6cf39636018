"""What a policy decides, and what it is told.

All streams of a trace are replayed at once: state is an array with one row a stream, and a policy is called
once a step with the events of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_hisparse.traces import Trace

__all__ = ["Events", "Flags", "Indices", "Policy", "RankedPolicy"]

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Events(NamedTuple):
    """Things that happen in one step, each to one row: equally long arrays. Distinct rows."""

    stream: Indices
    slot: Indices
    position: Indices
    entry: Indices  # the position's place in the step's selection


class Policy(ABC):
    """Chooses the slots that give way. One object replays one trace with one size of region.

    Every step calls `hit`; one that misses also calls `evict`, then `load`. Policies own what they remember.
    """

    name: ClassVar[str]
    needs_scores: ClassVar[bool] = False

    def __init__(self, trace: Trace, rows: int) -> None:
        self.trace = trace
        self.rows = rows  # slots of each stream's region
        self.shape = (trace.num_streams, rows)

    @classmethod
    def region_rows(cls, trace: Trace, rows: int) -> int:
        """Slots of the region that is replayed for a budget of `rows`."""
        return rows

    def hit(self, step: int, rows: Events) -> None:  # noqa: B027 many policies do not care
        """These rows were selected and are in their slots."""

    @abstractmethod
    def evict(self, step: int, count: Indices, pinned: Flags, position_of: Indices) -> Flags:
        """Slots to give up, bool [streams, rows]: just `count` [streams] of each stream, none of them pinned.

        `pinned` bool [streams, rows]: what the step reads. `position_of` [streams, rows]: -1 for an empty
        slot, which is to be taken before any other.
        """

    def load(self, step: int, rows: Events, evicted: Indices) -> None:  # noqa: B027 see above
        """These rows were missing and now are in their slots; `evicted`: what was there, -1 for none."""


class RankedPolicy(Policy):
    """A policy that orders slots by a number; ties go by slot."""

    @abstractmethod
    def rank(self, step: int, position_of: Indices) -> NDArray[Any]:
        """Integers [streams, rows], at least 0, below 2**40; the lowest give way first."""

    def evict(self, step: int, count: Indices, pinned: Flags, position_of: Indices) -> Flags:
        """The `count` lowest ranks, empty slots before all others."""
        # Rank and slot in one integer: distinct, so a plain sort finds the boundary, and ties go by slot.
        order = self.rank(step, position_of).astype(np.int64)
        order[position_of < 0] = -1
        order *= self.rows
        order += np.arange(self.rows)
        order[pinned] = np.iinfo(np.int64).max
        last = np.sort(order, axis=1)[np.arange(len(count)), np.maximum(count, 1) - 1]
        chosen: Flags = (order <= last[:, None]) & (count > 0)[:, None]
        return chosen
