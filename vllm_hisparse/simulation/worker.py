"""A rank in time: it applies messages, counts what is on the host only, and copies as fast as its link."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm_hisparse.messages import Acknowledgement, Progress, StepMessage
from vllm_hisparse.simulation.hardware import Hardware
from vllm_hisparse.simulation.model import PAGE_TOKENS, ServedModel

__all__ = ["ModelledRank"]


@dataclass
class _Slot:
    """What the rank knows of a bound request."""

    on_host: set[int] = field(default_factory=set)  # pages that only the host has
    hot_rows: int = 0


class ModelledRank:
    """One rank's tables and link. Seconds are the simulation's."""

    def __init__(self, model: ServedModel, hardware: Hardware) -> None:
        self._model = model
        self._hardware = hardware
        self._page_bytes = model.token_bytes * PAGE_TOKENS
        self._slots: dict[int, _Slot] = {}
        self._bound: dict[str, int] = {}
        self._copying: deque[tuple[float, int]] = deque()  # (when it ends, transfer)
        self._progress = Progress()
        self._reported = Progress()
        self._misses: dict[int, int] = {}
        self._link_free = 0.0  # when the copies to the host that are enqueued end
        self.spilled_bytes = 0
        self.read_bytes = 0  # misses and prefill staging
        self.restored_bytes = 0

    def apply(self, message: StepMessage, now: float) -> float:
        """A step's message. Returns seconds for which restores keep the link from the step's reads."""
        for request_id in message.unbind:
            self._bound.pop(request_id, None)
        for request_id, slot in message.bind:
            self._bound[request_id] = slot
            self._slots[slot] = _Slot()
        for region in message.regions:
            self._slots[region.slot].hot_rows = region.num_rows
        for write in message.pages:
            on_host = self._slots[write.slot].on_host
            (on_host.add if write.device_blocks[0] < 0 else on_host.discard)(write.page)
        spilled, restored = (len(copies) * self._page_bytes for copies in (message.spill, message.restore))
        if message.transfer_id >= 0:
            self._progress = self._progress._replace(enqueued=message.transfer_id)
            self._link_free = max(self._link_free, now) + spilled / (self._hardware.to_host_gbps * 1e9)
            self._copying.append((self._link_free, message.transfer_id))
        self.spilled_bytes += spilled
        self.restored_bytes += restored
        return restored / (self._hardware.to_device_gbps * 1e9)

    def decode_s(self, request_id: str, num_tokens: int) -> float:
        """Seconds of reads from the host for a decode step of a request with `num_tokens` tokens."""
        slot = self._slots[self._bound[request_id]]
        num_pages = -(-num_tokens // PAGE_TOKENS)
        missed = self._hardware.missed_rows(self._model, len(slot.on_host) / num_pages, slot.hot_rows)
        if missed:
            self._misses[self._bound[request_id]] = int(missed * self._model.num_leaders)
        return self._read(missed * self._model.token_bytes)

    def prefill_s(self, request_id: str) -> float:
        """Seconds to stage a request's host-only pages for a chunk of its prompt."""
        return self._read(len(self._slots[self._bound[request_id]].on_host) * self._page_bytes)

    def acknowledge(self, now: float) -> Acknowledgement | None:
        """What has been enqueued and has ended since the last call."""
        misses, self._misses = self._misses, {}
        while self._copying and self._copying[0][0] <= now:
            self._progress = self._progress._replace(completed=self._copying.popleft()[1])
        if self._progress == self._reported and not misses:
            return None
        self._reported = self._progress
        return Acknowledgement({0: self._progress}, misses)

    @property
    def next_completion(self) -> float | None:
        """When the oldest copy ends."""
        return self._copying[0][0] if self._copying else None

    def _read(self, num_bytes: float) -> float:
        self.read_bytes += int(num_bytes)
        return num_bytes / (self._hardware.to_device_gbps * 1e9)
