"""A newcomer that was refused blocks, and how long the refusal stands.

vLLM asks about the request at the head of its queue in every step, and looks its prefix up for that: work
that grows with the prompt, in steps that are all alike. Whether there is room can only have changed if as
many blocks as it lacked came free, can be reclaimed or were found to hold its prefix since, or if requests
came, started or ended. Until then the answer is known, though for no more steps than what else is known of
those that wait (`queueing.py`): a prefix may have grown meanwhile, here or with another connector.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["Refusal"]


class Refusal:
    """The last refusal of one engine. vLLM asks about nobody behind the request that was refused."""

    def __init__(self, coordinator: "HiSparseCoordinator") -> None:
        self._coordinator = coordinator
        self._request_id = ""
        self._num_missing = 0  # device blocks that the request lacked; 0: there is no refusal
        self._num_gained = 0  # by `_gains` then
        self._limits = (0, 0, 0)  # by `_what_else` then

    def note(self, request_id: str, num_wanted: int) -> None:
        """vLLM could not admit the request, which holds no blocks and wanted so many of the device."""
        self._request_id = request_id
        self._num_missing = num_wanted - self._coordinator.pool.get_num_free_blocks()
        self._num_gained = self._gains()
        self._limits = self._what_else()

    def lift(self) -> None:
        """A request has come, started or ended, or what is known of prefixes is too old."""
        self._num_missing = 0

    def stands(self, request_id: str) -> bool:
        """Whether the request has been refused and would be again."""
        if self._num_missing <= 0 or request_id != self._request_id:
            return False
        gained = self._gains() - self._num_gained
        limits = zip(self._what_else(), self._limits, strict=True)
        if (
            gained >= self._num_missing
            or any(now > then for now, then in limits)
            or not self._coordinator.records
        ):
            self.lift()
        return self._num_missing > 0

    def _gains(self) -> int:
        """Blocks that are free; at most so many that could be reclaimed since start, a page each; and at most
        so many, with keys, that a prefix hit has grown by.
        """
        coordinator, num_parts = self._coordinator, self._coordinator.layout.num_parts
        found = coordinator.num_published * (num_parts + 1)
        return coordinator.pool.get_num_free_blocks() + coordinator.reclaimer.num_clean * num_parts + found

    def _what_else(self) -> tuple[int, int, int]:
        """What else there can be more of, so that less is wanted or more can be reclaimed."""
        coordinator = self._coordinator
        return (
            coordinator.reclaimer.num_changes,
            coordinator.regions.num_free_ids,
            coordinator.host_pool.get_num_free_blocks(),
        )
