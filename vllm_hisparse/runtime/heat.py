"""Which pages the selections touch, sampled on the device and read without stopping the stream."""

from collections.abc import Sequence

import torch

from vllm_hisparse.planning.layout import Layout

from .transfer import to_device

__all__ = ["HeatProbe"]

HOT_PAGES = 32  # a request, reported a sample: enough to keep what is read all the time


class HeatProbe:
    """int32 [requests, pages]: rows selected of each page, halved at every sample, so that recent ones weigh
    most.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._page_tokens = layout.page_tokens
        self._device = device
        self._heat = torch.zeros((layout.max_requests, layout.max_pages), dtype=torch.int32, device=device)
        self._num_hot = min(HOT_PAGES, layout.max_pages)
        on_cuda = device.type == "cuda"
        # [2, requests of the sample, hot pages], pages and their heat. Flat, because the copy of a part that
        # is not contiguous would wait.
        size = 2 * layout.max_requests * self._num_hot
        self._copy = torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)
        self._arrived = torch.Event(device=device) if on_cuda else None
        self._slots: list[int] = []  # request slots of the sample in `_copy`; -1 for a previous owner's

    def forget(self, slots: Sequence[int]) -> None:
        """Request slots have new owners."""
        self._heat.index_fill_(0, self._send(slots), 0)
        self._slots = [-1 if slot in slots else slot for slot in self._slots]

    def sample(
        self, topk: torch.Tensor, rows: Sequence[int], owners: Sequence[int]
    ) -> dict[int, tuple[int, ...]]:
        """Add the query rows `rows` of a selection int32 [T, K], which belong to the request slots `owners`.

        Returns the hottest pages of each request in the latest sample that has arrived, hottest first.
        """
        if self._arrived is not None and not self._arrived.query():
            return {}
        report = self._report()
        self._slots = list(dict.fromkeys(owners))
        if not self._slots:
            return report
        self._add(topk.index_select(0, self._send(rows)), self._send(owners))
        self._start_copy()
        return report if self._arrived is not None else self._report()

    def _add(self, topk: torch.Tensor, owners: torch.Tensor) -> None:
        num_pages = self._heat.shape[1]
        page = topk // self._page_tokens
        counted = (topk >= 0) & (page < num_pages)
        index = torch.where(counted, owners.unsqueeze(1) * num_pages + page, 0).flatten()
        self._heat >>= 1
        self._heat.view(-1).scatter_add_(0, index, counted.flatten().int())

    def _start_copy(self) -> None:
        heat, page = self._heat.index_select(0, self._send(self._slots)).topk(self._num_hot, dim=1)
        self._sample().copy_(torch.stack((page.int(), heat)), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def _report(self) -> dict[int, tuple[int, ...]]:
        pages, heat = self._sample().tolist()
        return {
            slot: tuple(page for page, warmth in zip(pages[i], heat[i], strict=True) if warmth > 0)
            for i, slot in enumerate(self._slots)
            if slot >= 0
        }

    def _sample(self) -> torch.Tensor:
        shape = (2, len(self._slots), self._num_hot)
        return self._copy[: 2 * len(self._slots) * self._num_hot].view(shape)

    def _send(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self._device)
