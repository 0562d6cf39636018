"""Both pools as tensors, and the views that layers get of them."""

import torch
import torch.distributed as dist

from vllm_hisparse.planning.layout import Layout

from .host_memory import host_memory

__all__ = ["LayerTable", "Memory"]


class LayerTable:
    """Where each layer's rows lie, as the page ops take it: one entry a layer, on the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        def column(values: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.offset = column(layout.layer_offset, torch.int64)  # [layers] bytes into a device block
        self.part = column(layout.layer_part, torch.int32)  # [layers]
        self.host_offset = column(layout.host_offset, torch.int64)  # [layers] bytes into the host pool
        self.host_row_stride = column(layout.host_row_stride, torch.int64)  # [layers] bytes


class Memory:
    """The device pool (uint8 [bytes], on the device) and the host pool (uint8 [bytes], pinned on CUDA).

    Owns the device pool. The host pool is one for the ranks of `group` on this node, which write it in
    `turns`.
    """

    def __init__(self, layout: Layout, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.layout = layout
        self.layers = LayerTable(layout, device)
        size = layout.device_pool_bytes + layout.device_slack_bytes
        self.device_pool = torch.zeros(size, dtype=torch.uint8, device=device)
        host = host_memory(layout.host_pool_bytes, device.type == "cuda", group)
        self.host_pool = host.tensor[: layout.host_pool_bytes]
        self.turns = host.turns

    def group_host_rows(self, group: int) -> torch.Tensor:
        """Host rows of an index group, uint8 [host rows, row bytes of all its layers]."""
        row_bytes = self.layout.group_row_bytes[group]
        start = self.layout.group_host_offset[group]
        return self.host_pool[start : start + self.layout.num_host_rows * row_bytes].view(-1, row_bytes)

    def resident_rows(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """Contiguous [n, page_tokens, width] from the layer's first page on: flat row ids of the resolver
        index it.
        """
        page = self.layout.page_bytes
        offset = self.layout.layer_offset[layer]
        num_pages = (self.device_pool.numel() - offset) // page
        flat = self.device_pool[offset : offset + num_pages * page].view(dtype)
        return flat.view(num_pages, self.layout.page_tokens, -1)

    def resident_pages(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """Strided [device blocks, page_tokens, width]: the layer's page of every block, to be written by
        slot.
        """
        rows = self.resident_rows(layer, dtype)
        width = rows.shape[-1]
        shape = (self.layout.num_device_blocks, self.layout.page_tokens, width)
        return rows.as_strided(shape, (self.layout.block_stride_rows * width, width, 1))

    def host_pages(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """Strided [host blocks, 1, page_tokens, width] view of a layer's host rows; rows are
        `host_row_stride` apart.
        """
        layout = self.layout
        item = dtype.itemsize
        row = layout.host_row_stride[layer] // item
        flat = self.host_pool.view(dtype)
        shape = (layout.num_host_blocks, 1, layout.page_tokens, layout.row_bytes // item)
        strides = (layout.page_tokens * row, layout.page_tokens * row, row, 1)
        return flat.as_strided(shape, strides, layout.host_offset[layer] // item)

    def indexer_pages(self, index: int) -> torch.Tensor:
        """Strided uint8 [device blocks * indexer_pages, 1, page_tokens, row bytes] of an indexer layer's
        keys.
        """
        layout = self.layout
        page_bytes = layout.geometry.shape.indexer_page_bytes
        row = page_bytes // layout.page_tokens
        shape = (layout.num_device_blocks * layout.indexer_pages, 1, layout.page_tokens, row)
        strides = (layout.indexer_stride_bytes, page_bytes, row, 1)
        return self.device_pool.as_strided(shape, strides, layout.indexer_offset[index])

    def indexer_shares(self, index: int) -> torch.Tensor:
        """Strided uint8 [device blocks, share bytes]: what an indexer layer stands for when blocks are saved
        as a whole.
        """
        layout = self.layout
        shape = (layout.num_device_blocks, layout.indexer_share_bytes)
        strides = (layout.block_stride_bytes, 1)
        return self.device_pool.as_strided(shape, strides, layout.indexer_share_offset[index])
