"""Where page copies run, and how their end is noticed."""

from collections.abc import Callable
from typing import Protocol

__all__ = ["CopyQueue", "InlineCopies"]


class CopyQueue(Protocol):
    """Runs copies in the order they are submitted, beside the forward or before it."""

    def submit(self, transfer_id: int, copy: Callable[[], None]) -> None:
        """Enqueue the copies of a transfer. They see everything submitted to the compute stream before."""

    def wait(self, transfer_ids: tuple[int, ...]) -> None:
        """Make the compute stream, not the caller, wait for these transfers' copies."""

    def take_completed(self) -> list[int]:
        """Transfers whose copies have ended since the last call. Never blocks."""


class InlineCopies:
    """Copies on the calling thread, done when `submit` returns: the CPU's queue."""

    def __init__(self) -> None:
        self._completed: list[int] = []

    def submit(self, transfer_id: int, copy: Callable[[], None]) -> None:
        """Run the copies."""
        copy()
        self._completed.append(transfer_id)

    def wait(self, transfer_ids: tuple[int, ...]) -> None:
        """Nothing to wait for."""

    def take_completed(self) -> list[int]:
        """Everything submitted since the last call."""
        completed, self._completed = self._completed, []
        return completed
