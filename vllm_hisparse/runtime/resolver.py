"""One index group's selections, from positions to physical rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from vllm_hisparse import ops

from .tables import SelectionState

if TYPE_CHECKING:
    from .runtime import HiSparseRuntime

__all__ = ["GroupResolver"]


class GroupResolver:
    """Resolver state and result buffers of one index group. Everything runs on the current stream."""

    def __init__(
        self, runtime: "HiSparseRuntime", group: int, max_rows: int, top_k: int, device: torch.device
    ) -> None:
        layout = runtime.layout
        self._runtime = runtime
        self._layers = [layout.layer_index[name] for name in layout.index_groups[group]]
        self._parts = list(layout.group_parts[group])
        self.state = SelectionState.allocate(layout, device)
        self._host_rows = runtime.memory.group_host_rows(group)
        self._layer_offset = runtime.memory.layers.offset[self._layers].contiguous()  # [layers of the group]
        self._layer_part = runtime.memory.layers.part[self._layers].contiguous()
        planned = min(runtime.config.floor_hot_rows, layout.max_hot_rows)
        self._top_k = top_k
        self._rows = _int32(len(self._parts) * max_rows * top_k, device)
        self._counts = _int32(max_rows, device)
        self._plan_host_row = _int32((layout.max_requests, planned), device)
        self._plan_slot = _int32((layout.max_requests, planned), device)
        self._plan_count = runtime.misses.rows[group]
        self._counters = runtime.counters.rows[group]

    def resolve(self, topk: torch.Tensor, query_start: torch.Tensor) -> None:
        """Resolve int32 [T, K] positions of batch rows `query_start` int32 [R + 1], and fetch what misses."""
        runtime, tables = self._runtime, self._runtime.tables
        n = topk.shape[0]
        ops.resolve(
            topk,
            query_start,
            self._planes(n),
            self._counts[:n],
            tables.resident,
            tables.host,
            tables.hot,
            tables.hot_rows,
            tables.row_request,
            tables.hot_region,
            self.state.slot_of,
            self.state.position_of,
            self.state.key,
            self.state.clock,
            self._plan_host_row,
            self._plan_slot,
            self._plan_count,
            self._counters,
            parts=self._parts,
            block_size=runtime.layout.page_tokens,
            block_stride_rows=runtime.layout.block_stride_rows,
            max_query_rows=runtime.config.verify_rows,
            policy=ops.Policy[runtime.config.policy.upper()],
        )
        ops.fetch(
            self._host_rows,
            runtime.memory.device_pool,
            self._layer_offset,
            self._layer_part,
            self._plan_host_row,
            self._plan_slot,
            self._plan_count,
            tables.row_request,
            tables.hot_region,
            tables.hot,
            row_bytes=runtime.layout.row_bytes,
            block_size=runtime.layout.page_tokens,
            block_stride_bytes=runtime.layout.block_stride_bytes,
            skip_io=runtime.config.skip_io,
        )

    def result(self, part: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows int32 [num_rows, K] of a layer in `part`, counts int32 [num_rows]) of the last `resolve`."""
        return self._planes(num_rows)[self._parts.index(part)], self._counts[:num_rows]

    def _planes(self, num_rows: int) -> torch.Tensor:
        """The result's contiguous planes, [parts, num_rows, K], at the start of one buffer."""
        size = len(self._parts) * num_rows * self._top_k
        return self._rows[:size].view(len(self._parts), num_rows, self._top_k)

    def staged_chunks(
        self, layer: int, topk: torch.Tensor, query_start: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """See `HiSparseIndexGroup.prefill_chunks`."""
        for chunk in self._runtime.staging.plan(topk, query_start):
            yield (
                chunk.first,
                chunk.end,
                chunk.rows,
                self._runtime.staging.gather(self._layers[layer], chunk, dtype),
            )


def _int32(shape: int | tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)
