"""The resolvers' counters, read without stopping the stream."""

import torch

from vllm_hisparse import ops

__all__ = ["Counters"]


class Counters:
    """int64 [index groups, 8] on the device, written by the resolvers; read a step late from a pinned copy.

    `totals` never waits: a copy that has not arrived yet is reported by a later call.
    """

    def __init__(self, num_groups: int, device: torch.device) -> None:
        self.rows = torch.zeros((num_groups, 8), dtype=torch.int64, device=device)
        self._copy = torch.zeros_like(self.rows, device="cpu", pin_memory=device.type == "cuda")
        self._arrived = torch.Event(device=device) if device.type == "cuda" else None
        self._latest = torch.zeros((num_groups, 8), dtype=torch.int64)

    def totals(self) -> torch.Tensor:
        """Latest totals since start, int64 [index groups, 8] on the CPU, and starts the next copy."""
        if self._arrived is None:
            return self.rows.clone()
        if self._arrived.query():
            self._latest = self._copy.clone()
            self._copy.copy_(self.rows, non_blocking=True)
            self._arrived.record()
        return self._latest

    def exact(self) -> dict[str, int]:
        """Totals of all index groups now, by name. Synchronises: for tests and the demo."""
        total = self.rows.sum(0).tolist()
        return {counter.name.lower(): total[counter] for counter in ops.Counter}
