"""What the resolvers count, read without stopping the stream."""

import torch

from vllm_hisparse import ops

__all__ = ["STAGED", "Counters", "MissProbe"]

STAGED = 7  # behind the resolvers' own: pages of one layer that prefills read from the host, in group 0's row

COPY_EVERY = 16


class Counters:
    """int64 [index groups, 8] on the device, written by the resolvers and by the staging of prefills; read a
    step late from a pinned copy.

    `totals` never waits: a copy that has not arrived yet is reported by a later call. On CUDA it starts one
    every `COPY_EVERY` calls, since the next step's kernels wait for it.
    """

    def __init__(self, num_groups: int, device: torch.device) -> None:
        self._num_calls = 0
        self.rows = torch.zeros((num_groups, 8), dtype=torch.int64, device=device)
        self._copy = torch.zeros_like(self.rows, device="cpu", pin_memory=device.type == "cuda")
        self._arrived = torch.Event(device=device) if device.type == "cuda" else None
        self._latest = torch.zeros((num_groups, 8), dtype=torch.int64)

    def totals(self) -> torch.Tensor:
        """Latest totals since start, int64 [index groups, 8] on the CPU: the same tensor until there are
        others.
        """
        if self._arrived is None:
            return self.rows.clone()
        self._num_calls += 1
        if self._num_calls % COPY_EVERY == 0 and self._arrived.query():
            self._latest = self._copy.clone()
            self._copy.copy_(self.rows, non_blocking=True)
            self._arrived.record()
        return self._latest

    def exact(self) -> dict[str, int]:
        """Totals of all index groups now, by name. Synchronises: for tests and the demo."""
        total = self.rows.sum(0).tolist()
        return {counter.name.lower(): total[counter] for counter in ops.Counter}


class MissProbe:
    """int32 [index groups, batch rows] on the device: rows that each batch row's selections planned to read.

    `sample` never waits: what it returns may be a step or more old.
    """

    def __init__(self, num_groups: int, max_batch: int, device: torch.device) -> None:
        self.rows = torch.zeros((num_groups, max_batch), dtype=torch.int32, device=device)
        self._on_cuda = device.type == "cuda"
        self._copy = torch.zeros_like(self.rows, device="cpu", pin_memory=self._on_cuda)
        self._arrived = torch.Event(device=device) if self._on_cuda else None
        self._slots: list[int] = []  # request slots of the batch that was copied

    def sample(self, slots: list[int]) -> dict[int, int]:
        """Misses by request slot, of the last copy that has arrived; starts the next, of a batch with
        `slots`.
        """
        if self._arrived is not None and not self._arrived.query():
            return {}
        if self._arrived is None:
            self._slots = slots
            self._copy.copy_(self.rows)
        sampled = dict(zip(self._slots, self._copy.sum(0).tolist(), strict=False))
        if self._arrived is not None:
            self._slots = list(slots)
            self._copy.copy_(self.rows, non_blocking=True)
            self._arrived.record()
        return sampled
