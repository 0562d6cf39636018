"""A newcomer that was refused blocks, and how long the refusal stands.

vLLM asks about the request at the head of its queue in every step, and looks its prefix up for that: work
that grows with the prompt, in steps that are all alike. Whether there is room can only have changed if blocks
came free, if what can be reclaimed changed, or if requests came, started or ended. Until then the answer is
known.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["Refusal"]

MAX_AGE = 16  # steps: a prefix may have grown meanwhile, here or with another connector


class Refusal:
    """The last refusal of one engine. Whoever is at the head of the queue: nobody else is asked about."""

    def __init__(self, coordinator: "HiSparseCoordinator") -> None:
        self._coordinator = coordinator
        self._num_free: int | None = None  # free device blocks at the refusal; None: there is none
        self._num_changes = 0
        self._age = 0

    def note(self) -> None:
        """vLLM could not admit a request that holds no blocks."""
        self._num_free = self._coordinator.pool.get_num_free_blocks()
        self._num_changes = self._coordinator.reclaimer.num_changes
        self._age = 0

    def lift(self) -> None:
        """A request has come, started or ended."""
        self._num_free = None

    def end_step(self) -> None:
        """The refusal is a step older."""
        self._age += 1
        if self._age >= MAX_AGE:
            self.lift()

    def stands(self) -> bool:
        """Whether the request would be refused again."""
        if self._num_free is None:
            return False
        coordinator = self._coordinator
        if (
            not coordinator.records
            or coordinator.pool.get_num_free_blocks() > self._num_free
            or coordinator.reclaimer.num_changes != self._num_changes
        ):
            self.lift()
            return False
        return True
