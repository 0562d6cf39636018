"""Which pages the selections touch, sampled on the device and read without stopping the stream."""

import torch

from vllm_hisparse.planning.layout import Layout

__all__ = ["HeatProbe"]

HOT_PAGES = 32  # a request, reported a sample: enough to keep what is read all the time


class HeatProbe:
    """int32 [requests, pages]: rows selected of each page, halved at every sample, so that recent ones weigh
    most.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._page_tokens = layout.page_tokens
        self._heat = torch.zeros((layout.max_requests, layout.max_pages), dtype=torch.int32, device=device)
        self._num_hot = min(HOT_PAGES, layout.max_pages)
        shape = (2, layout.max_requests, self._num_hot)  # pages and their heat
        on_cuda = device.type == "cuda"
        self._copy = torch.zeros(shape, dtype=torch.int32, pin_memory=on_cuda)
        self._arrived = torch.Event(device=device) if on_cuda else None
        self._slots: list[int] = []  # request slots of the sample in `_copy`

    def forget(self, slots: list[int]) -> None:
        """Request slots have new owners."""
        self._heat[slots] = 0

    def sample(
        self, topk: torch.Tensor, query_start: torch.Tensor, slots: list[int]
    ) -> dict[int, tuple[int, ...]]:
        """Add a selection int32 [T, K] of batch rows `query_start` int32 [R + 1] that belong to request
        `slots`.

        Returns the hottest pages of each request in the latest sample that has arrived, hottest first.
        """
        if self._arrived is not None and not self._arrived.query():
            return {}
        report = self._report()
        self._add(topk, query_start[: len(slots) + 1], slots)
        self._start_copy(slots)
        return report if self._arrived is not None else self._report()

    def _add(self, topk: torch.Tensor, query_start: torch.Tensor, slots: list[int]) -> None:
        num_pages = self._heat.shape[1]
        owners = torch.tensor(slots, device=topk.device)
        tokens = torch.arange(topk.shape[0], device=topk.device)
        row = torch.searchsorted(
            query_start[1:].contiguous(), tokens, right=True
        )  # batch row of each query row
        page = topk // self._page_tokens
        counted = (topk >= 0) & (page < num_pages) & (row < len(slots)).unsqueeze(1)
        index = owners[row.clamp_max(len(slots) - 1)].unsqueeze(1) * num_pages + page
        self._heat >>= 1
        index = torch.where(counted, index, 0).flatten().long()
        self._heat.view(-1).scatter_add_(0, index, counted.flatten().int())

    def _start_copy(self, slots: list[int]) -> None:
        self._slots = list(slots)
        heat, page = self._heat[slots].topk(self._num_hot, dim=1)
        self._copy[:, : len(slots)].copy_(torch.stack((page.int(), heat)), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def _report(self) -> dict[int, tuple[int, ...]]:
        pages, heat = self._copy.tolist()
        return {
            slot: tuple(page for page, warmth in zip(pages[i], heat[i], strict=True) if warmth > 0)
            for i, slot in enumerate(self._slots)
        }
