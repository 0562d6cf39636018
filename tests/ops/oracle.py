"""Replacement policies written a second time, from their definitions and with other data structures."""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import floor, log2
from typing import Protocol


class Oracle(Protocol):
    slots: dict[int, int]

    def step(self, wanted: list[int], num_slots: int) -> list[tuple[int, int]]: ...


def _assign(misses: list[int], free: list[int], victims: list[int]) -> list[tuple[int, int]]:
    """The first misses get the freed slots, ascending; the others get nothing."""
    chosen = sorted((free + victims)[: len(misses)])
    return list(zip(misses, chosen, strict=False))


@dataclass
class LruOracle:
    """An ordered dict from position to slot, least recently used first."""

    slots: "OrderedDict[int, int]" = field(default_factory=OrderedDict)

    def step(self, wanted: list[int], num_slots: int) -> list[tuple[int, int]]:
        hits = [p for p in wanted if p in self.slots]
        misses = [p for p in wanted if p not in self.slots]
        free = sorted(set(range(num_slots)) - set(self.slots.values()))
        loaded = _assign(misses, free, [slot for p, slot in self.slots.items() if p not in hits])
        taken = {slot for _, slot in loaded}
        for p in [p for p, slot in self.slots.items() if slot in taken]:
            del self.slots[p]
        for p, slot in loaded:  # ascending slots, as the tie between equal ages
            self.slots[p] = slot
        for p in sorted(hits, key=self.slots.__getitem__):
            self.slots.move_to_end(p)
        return loaded


@dataclass
class LrfuOracle:
    """A key for every position ever referenced, in a slot or not, and all of its references.

    The keys follow the fixed-point recurrence; the references give the sum of weights that a key stands for.
    """

    slots: dict[int, int] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)
    references: dict[int, list[int]] = field(default_factory=dict)
    clock: int = 0

    def step(self, wanted: list[int], num_slots: int) -> list[tuple[int, int]]:
        self.clock += 1
        hits = [p for p in wanted if p in self.slots]
        misses = [p for p in wanted if p not in self.slots]
        free = sorted(set(range(num_slots)) - set(self.slots.values()))
        oldest_key = self.clock + 256 - 1023  # what is older ranks like this
        others = sorted(
            (max(self.keys[p], oldest_key), slot, p) for p, slot in self.slots.items() if p not in hits
        )
        loaded = _assign(misses, free, [slot for _, slot, _ in others])
        taken = {slot for _, slot in loaded}
        for p in [p for p, slot in self.slots.items() if slot in taken]:
            del self.slots[p]
            self.keys[p] = self.keys[p] // 2 * 2  # half of it is what a ghost keeps
        for p in hits + [p for p, _ in loaded]:
            self.references.setdefault(p, []).append(self.clock)
            self.keys[p] = self._touch(self.keys.get(p))
        self.slots.update(loaded)
        return loaded

    def _touch(self, key: int | None) -> int:
        now = self.clock + 128
        if key is None:
            return now
        return max(key, now) + floor(16 * log2(1 + 2 ** (-abs(key - now) / 16)) + 0.5)

    def weight_log(self, position: int) -> float:
        """16 * log2 of the sum of the references' weights, seen from now."""
        return 16 * log2(sum(2 ** ((t - self.clock) / 16) for t in self.references[position]))
