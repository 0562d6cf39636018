"""One index group's selections, from positions to physical rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from vllm_hisparse import ops
from vllm_hisparse.planning.layout import Layout

from .tables import SelectionState

if TYPE_CHECKING:
    from .runtime import HiSparseRuntime

__all__ = ["GroupResolver", "ResultBuffers"]


class ResultBuffers:
    """What a resolve writes: physical rows, counts, and the plan of its misses. All int32, at fixed
    addresses.

    Index groups take turns: a group's layers have read their rows before the next leader resolves.
    """

    def __init__(
        self, layout: Layout, max_rows: int, top_k: int, num_planned: int, device: torch.device
    ) -> None:
        self._top_k = top_k
        max_parts = max(len(parts) for parts in layout.group_parts)
        self._rows = _int32(max_parts * max_rows * top_k, device)
        self.counts = _int32(max_rows, device)  # [rows]
        self.plan_host_row = _int32((layout.max_requests, num_planned), device)
        self.plan_slot = _int32((layout.max_requests, num_planned), device)

    def planes(self, num_parts: int, num_rows: int) -> torch.Tensor:
        """Contiguous [parts, num_rows, K]: the rows of a layer in each of a group's parts."""
        size = num_parts * num_rows * self._top_k
        return self._rows[:size].view(num_parts, num_rows, self._top_k)


class GroupResolver:
    """Resolver state of one index group. Everything runs on the current stream."""

    def __init__(
        self, runtime: "HiSparseRuntime", group: int, result: ResultBuffers, device: torch.device
    ) -> None:
        layout = runtime.layout
        self.runtime = runtime
        self._group = group
        self.layers = [layout.layer_index[name] for name in layout.index_groups[group]]
        self._parts = list(layout.group_parts[group])
        self.state = SelectionState.allocate(layout, device)
        self._host_rows = runtime.memory.group_host_rows(group)
        self._layer_offset = runtime.memory.layers.offset[self.layers].contiguous()  # [layers of the group]
        self._layer_part = runtime.memory.layers.part[self.layers].contiguous()
        self._result = result
        self._plan_count = runtime.misses.rows[group]
        # Rows of single layers, and where the plan finds them: none with prefetch, or for one layer.
        self._layer_rows = self._host_rows.view(-1, layout.row_bytes)
        prefetches = runtime.config.prefetch or len(self.layers) == 1
        self._planned_rows = None if prefetches else torch.zeros_like(result.plan_host_row)
        self._counters = runtime.counters.rows[group]

    def resolve(self, topk: torch.Tensor, query_start: torch.Tensor) -> None:
        """Resolve int32 [T, K] positions of batch rows `query_start` int32 [R + 1], and fetch what misses.

        That is for all layers of the group or, without prefetch, for the leader.
        """
        runtime, tables, result = self.runtime, self.runtime.tables, self._result
        n = topk.shape[0]
        if runtime.recorder is not None:
            runtime.recorder.record(self._group, topk, query_start)
        ops.resolve(
            topk,
            query_start,
            result.planes(len(self._parts), n),
            result.counts[:n],
            tables.resident,
            tables.host,
            tables.hot,
            tables.batch,
            self.state.slot_of,
            self.state.position_of,
            self.state.key,
            self.state.clock,
            result.plan_host_row,
            result.plan_slot,
            self._plan_count,
            self._counters,
            parts=self._parts,
            block_size=runtime.layout.page_tokens,
            block_stride_rows=runtime.layout.block_stride_rows,
            max_query_rows=runtime.config.verify_rows,
            policy=ops.Policy[runtime.config.policy.upper()],
        )
        if self._planned_rows is not None:
            self.fetch_layer(0)
            return
        ops.fetch_selected(
            self._host_rows,
            runtime.memory.device_pool,
            self._layer_offset,
            self._layer_part,
            result.plan_host_row,
            result.plan_slot,
            self._plan_count,
            tables.batch,
            tables.hot,
            topk,
            query_start,
            tables.resident,
            tables.host,
            self.state.slot_of,
            part=self._parts[0],
            row_bytes=runtime.layout.row_bytes,
            block_size=runtime.layout.page_tokens,
            block_stride_bytes=runtime.layout.block_stride_bytes,
            skip_io=runtime.config.skip_io,
        )

    def fetch_layer(self, layer: int) -> None:
        """Fetch what the last `resolve` planned for one layer of the group, by its index there.

        Without prefetch; otherwise it is there already.
        """
        if self._planned_rows is None:
            return
        runtime, tables, result = self.runtime, self.runtime.tables, self._result
        torch.mul(result.plan_host_row, len(self.layers), out=self._planned_rows)
        self._planned_rows.add_(layer)
        ops.fetch(
            self._layer_rows,
            runtime.memory.device_pool,
            self._layer_offset[layer : layer + 1],
            self._layer_part[layer : layer + 1],
            self._planned_rows,
            result.plan_slot,
            self._plan_count,
            tables.batch,
            tables.hot,
            row_bytes=runtime.layout.row_bytes,
            block_size=runtime.layout.page_tokens,
            block_stride_bytes=runtime.layout.block_stride_bytes,
            skip_io=runtime.config.skip_io,
        )

    def result(self, part: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows int32 [num_rows, K] of a layer in `part`, counts int32 [num_rows]) of the last `resolve`."""
        rows = self._result.planes(len(self._parts), num_rows)[self._parts.index(part)]
        return rows, self._result.counts[:num_rows]

    def staged_chunks(
        self, layer: int, topk: torch.Tensor, query_start: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """See `HiSparseIndexGroup.prefill_chunks`."""
        for chunk in self.runtime.staging.plan(topk, query_start):
            yield (
                chunk.first,
                chunk.end,
                chunk.rows,
                self.runtime.staging.gather(self.layers[layer], chunk, dtype),
            )


def _int32(shape: int | tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)
