"""Resolvers under one interface: `resolve` writes rows, `move` brings the misses; both may be captured in
a graph.

Attributes: topk [batch, k] input; rows [batch, k] output: row i of a layer's view of the pool, -1 where none.
"""

import torch
from workload import BLOCK_SIZE, PAGES, POSITIONS, SLOTS, TOP_K, Memory

from vllm_hisparse.ops import EMPTY_KEY, make_batch

INT32 = {"dtype": torch.int32, "device": "cuda"}


class Ours:
    """The package's ops. `split`: the layers as groups of one, each with a host area of its own (layer by
    layer)."""

    def __init__(self, memory: Memory, table: torch.Tensor, policy: int, split: bool = False) -> None:
        batch = table.shape[0]
        self.side_by_side = not split
        self.memory, self.policy, self.table = memory, policy, table
        page_bytes = BLOCK_SIZE * memory.row_bytes
        self.stride_bytes = memory.layers * page_bytes
        blocks = SLOTS // BLOCK_SIZE
        self.pool = torch.zeros(batch * blocks * self.stride_bytes, dtype=torch.uint8, device="cuda")
        self.topk = torch.full((batch, TOP_K), -1, **INT32)
        self.query_start = torch.arange(batch + 1, **INT32)
        self.all_rows = torch.empty(1, batch, TOP_K, **INT32)
        self.rows = self.all_rows[0]
        self.counts = torch.empty(batch, **INT32)
        self.resident = torch.full((1, batch, PAGES), -1, **INT32)
        self.hot = torch.randperm(batch * blocks, device="cuda").view(1, batch, blocks).int()
        row = torch.arange(batch, **INT32)
        self.batch = make_batch(row, row, torch.full_like(row, SLOTS))
        self.slot_of = torch.empty(batch, POSITIONS, dtype=torch.int16, device="cuda")
        self.position_of = torch.empty(batch, SLOTS, **INT32)
        self.key = torch.empty(batch, SLOTS, **INT32)
        self.clock = torch.empty(batch, **INT32)
        self.plan_host_row = torch.zeros(batch, TOP_K, **INT32)
        self.plan_slot = torch.zeros(batch, TOP_K, **INT32)
        self.plan_count = torch.zeros(batch, **INT32)
        self.counters = torch.zeros(8, dtype=torch.int64, device="cuda")
        offset = torch.arange(memory.layers, device="cuda") * page_bytes
        part = torch.zeros(memory.layers, **INT32)
        if split:
            self.groups = [(memory.area(i), offset[i : i + 1], part[i : i + 1]) for i in range(memory.layers)]
        else:
            self.groups = [(memory.rows, offset, part)]
        self.reset()

    def reset(self) -> None:
        self.slot_of.fill_(-1)
        self.position_of.fill_(-1)
        self.key.fill_(EMPTY_KEY)
        self.clock.zero_()
        self.counters.zero_()

    def resolve(self) -> None:
        torch.ops.hisparse.resolve(
            self.topk, self.query_start, self.all_rows, self.counts, self.resident, self.table, self.hot,
            self.batch, self.slot_of, self.position_of, self.key, self.clock,
            self.plan_host_row, self.plan_slot, self.plan_count, self.counters,
            [0], BLOCK_SIZE, self.stride_bytes // self.memory.row_bytes, 1, self.policy,
        )  # fmt: skip

    def move(self) -> None:
        for host, offset, part in self.groups:
            torch.ops.hisparse.fetch_selected(
                host, self.pool, offset, part, self.plan_host_row, self.plan_slot, self.plan_count,
                self.batch, self.hot, self.topk, self.query_start, self.resident, self.table, self.slot_of, 0,
                self.memory.row_bytes, BLOCK_SIZE, self.stride_bytes, False,
            )  # fmt: skip

    def layer_rows(self, layer: int) -> torch.Tensor:
        """[rows, row_bytes / 8] int64 view of the pool that `rows` indexes, for one layer."""
        words = self.memory.row_bytes // 8
        begin = layer * BLOCK_SIZE * words
        count = self.pool.numel() // self.memory.row_bytes - layer * BLOCK_SIZE
        return self.pool.view(torch.int64).as_strided((count, words), (words, 1), begin)

    def num_misses(self) -> int:
        return int(self.plan_count.sum())


class InTree:
    """vLLM's in-tree resolver with its layer-by-layer row copies; `union_rows` sizes its shared-memory
    hash table."""

    side_by_side = False

    def __init__(self, memory: Memory, table: torch.Tensor, union_rows: int) -> None:
        batch = table.shape[0]
        self.memory, self.table, self.union_rows = memory, table, union_rows
        blocks = SLOTS // BLOCK_SIZE
        shape = (batch * blocks, BLOCK_SIZE, memory.row_bytes)
        self.pools = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(memory.layers)]
        self.hosts = [memory.area(i) for i in range(memory.layers)]
        self.hot_table = torch.randperm(batch * blocks, device="cuda").view(batch, blocks).int()
        self.topk = torch.full((batch, TOP_K), -1, **INT32)
        self.device_rows = torch.full((batch, TOP_K), -1, **INT32)
        self.rows = torch.empty(batch, TOP_K, **INT32)
        self.counts = torch.empty(batch, **INT32)
        self.swap_host = torch.zeros(batch, TOP_K, **INT32)
        self.swap_device = torch.zeros(batch, TOP_K, **INT32)
        self.swap_counts = torch.zeros(batch, **INT32)
        self.request = torch.arange(batch, **INT32)
        self.held = torch.empty(batch, SLOTS, **INT32)
        self.order = torch.empty(batch, SLOTS, dtype=torch.int16, device="cuda")
        self.stats = torch.zeros(2, dtype=torch.uint64, device="cuda")
        self.reset()

    def reset(self) -> None:
        self.held.fill_(-1)
        self.order.copy_(torch.arange(SLOTS, dtype=torch.int16, device="cuda").expand_as(self.order))

    def resolve(self) -> None:
        torch.ops._C_cache_ops.hisparse_resolve_residency(
            self.hosts[0], self.pools[0], self.hot_table, self.topk, self.device_rows, self.held, self.order,
            self.request, SLOTS, self.union_rows, None, self.stats, self.rows, BLOCK_SIZE, self.request,
            self.table,
            BLOCK_SIZE, None, self.counts, self.swap_host, self.swap_device, self.swap_counts, None, 0, 0,
        )  # fmt: skip

    def move(self) -> None:
        for host, pool in zip(self.hosts, self.pools, strict=True):
            torch.ops._C_cache_ops.hisparse_gather_compact(
                host, pool, self.swap_host, self.swap_device, self.swap_counts
            )

    def layer_rows(self, layer: int) -> torch.Tensor:
        return self.pools[layer].view(torch.int64).view(-1, self.memory.row_bytes // 8)

    def planned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and pool rows of the last step's copies, int64 [n] each."""
        mask = torch.arange(TOP_K, device="cuda") < self.swap_counts[:, None]
        return self.swap_host[mask].long(), self.swap_device[mask].long()

    def num_misses(self) -> int:
        return int(self.swap_counts.sum())
