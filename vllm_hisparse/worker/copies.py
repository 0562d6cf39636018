"""Where page copies run, and how their end is noticed."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["CopyQueue", "InlineCopies", "StreamCopies"]


class CopyQueue(Protocol):
    """Runs copies in the order they are submitted, beside the forward or before it."""

    def submit(self, transfer_id: int, copy: Callable[[], None]) -> None:
        """Enqueue the copies of a transfer. They see everything submitted to the compute stream before.

        If `copy` raises, so does this; the transfer still counts as completed once what `copy` had enqueued
        until then has ended.
        """

    def wait(self, transfer_ids: tuple[int, ...]) -> None:
        """Make the compute stream, not the caller, wait for these transfers' copies."""

    def take_completed(self) -> list[int]:
        """Transfers whose copies have ended since the last call, in the order of `submit`. Never blocks."""

    def fence(self) -> Callable[[], bool]:
        """A question that never blocks: whether everything has ended that was submitted until now, here and
        to the compute stream.
        """


class InlineCopies:
    """Copies on the calling thread, done when `submit` returns: the CPU's queue."""

    def __init__(self) -> None:
        self._completed: list[int] = []

    def submit(self, transfer_id: int, copy: Callable[[], None]) -> None:
        """Run the copies."""
        self._completed.append(transfer_id)
        copy()

    def wait(self, transfer_ids: tuple[int, ...]) -> None:
        """Nothing to wait for."""

    def take_completed(self) -> list[int]:
        """Everything submitted since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def fence(self) -> Callable[[], bool]:
        """Everything has ended."""
        return lambda: True


class StreamCopies:
    """Copies on a side stream of the device, in order, beside the forward: CUDA's queue."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._device = device
        self._pending: deque[tuple[int, torch.Event]] = deque()

    def submit(self, transfer_id: int, copy: Callable[[], None]) -> None:
        """Enqueue the copies behind what the compute stream has been given so far."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        ended = torch.Event(self._device)
        self._pending.append((transfer_id, ended))
        try:
            with self._stream:
                copy()
        finally:
            ended.record(self._stream)

    def wait(self, transfer_ids: tuple[int, ...]) -> None:
        """Order the compute stream behind these transfers."""
        for transfer_id, ended in self._pending:
            if transfer_id in transfer_ids:
                torch.accelerator.current_stream(self._device).wait_event(ended)

    def take_completed(self) -> list[int]:
        """Transfers whose copies have ended; they end in the order they were submitted."""
        completed = []
        while self._pending and self._pending[0][1].query():
            completed.append(self._pending.popleft()[0])
        return completed

    def fence(self) -> Callable[[], bool]:
        """An event behind both streams."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        reached = torch.Event(self._device)
        reached.record(self._stream)
        return reached.query
