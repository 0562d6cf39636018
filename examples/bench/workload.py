"""Selections with a known number of misses, and host memory whose bytes say where they lie."""

from dataclasses import dataclass

import numpy as np
import torch

TOP_K = 2048
SLOTS = 4096
BLOCK_SIZE = 64
PAGES = 1568  # 100,352 tokens of context
POSITIONS = PAGES * BLOCK_SIZE
SCRAMBLE = 0x9E3779B97F4A7C15 - 2**64  # word i of host memory is i * SCRAMBLE
NUM_WARM, NUM_TIMED = 60, 40


def selections(batch: int, miss_pct: float, num_steps: int, seed: int = 0) -> torch.Tensor:
    """[steps, batch, k] int32 on the device. From the second step on, exactly round(k * miss_pct / 100)
    positions of a
    request are new and were not selected for as long as any policy here keeps a row."""
    rng = np.random.default_rng(seed)
    misses = round(TOP_K * miss_pct / 100)
    queue = np.stack([rng.permutation(POSITIONS) for _ in range(batch)]).astype(np.int32)
    current = queue[:, :TOP_K].copy()
    steps = np.empty((num_steps, batch, TOP_K), dtype=np.int32)
    head = TOP_K
    for step in range(num_steps):
        steps[step] = current
        if not misses:
            continue
        if head + misses > POSITIONS:
            head = 0
        for row in range(batch):
            places = rng.choice(TOP_K, misses, replace=False, shuffle=False)
            current[row, places] = queue[row, head : head + misses]
        head += misses
    return torch.from_numpy(steps).cuda()


def allocate_host(num_bytes: int) -> torch.Tensor:
    """Pinned bytes in which word i holds i * SCRAMBLE, written by the device."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    words = host.view(torch.int64)
    step = 2**26
    for begin in range(0, words.numel(), step):
        end = min(begin + step, words.numel())
        words[begin:end].copy_(torch.arange(begin, end, device="cuda") * SCRAMBLE, non_blocking=True)
    torch.cuda.synchronize()
    return host


def host_tables(batch: int, num_host_rows: int, in_runs: bool, seed: int = 1) -> torch.Tensor:
    """[batch, pages] int32 host blocks: a request's in one run each, or scattered over the whole memory.

    Never block 0, which is vLLM's null block: its op finds no page there.
    """
    blocks = num_host_rows // BLOCK_SIZE - 1
    rng = np.random.default_rng(seed)
    if in_runs:
        first = rng.integers(0, max(blocks - PAGES, 1), (batch, 1))
        table = (first + np.arange(PAGES)) % blocks
    else:
        table = np.stack([rng.choice(blocks, PAGES, replace=False) for _ in range(batch)])
    return torch.from_numpy(table.astype(np.int32) + 1).cuda()


@dataclass(frozen=True)
class Memory:
    """A host row of `layers` layers of `row_bytes`, in the first `gib` of the pinned memory."""

    host: torch.Tensor
    gib: float
    row_bytes: int
    layers: int
    in_runs: bool

    @property
    def group_row_bytes(self) -> int:
        return self.row_bytes * self.layers

    @property
    def num_rows(self) -> int:
        return int(self.gib * 2**30) // self.group_row_bytes // BLOCK_SIZE * BLOCK_SIZE

    @property
    def rows(self) -> torch.Tensor:
        """[num_rows, group_row_bytes]"""
        return self.host[: self.num_rows * self.group_row_bytes].view(self.num_rows, self.group_row_bytes)

    def area(self, layer: int) -> torch.Tensor:
        """[num_rows, row_bytes]: a layer's rows where every layer has an area of its own, behind each
        other."""
        begin = layer * self.num_rows * self.row_bytes
        return self.host[begin : begin + self.num_rows * self.row_bytes].view(self.num_rows, self.row_bytes)

    def expected(self, host_rows: torch.Tensor, layer: int, side_by_side: bool) -> torch.Tensor:
        """[n, row_bytes / 8] int64: the words of one layer of these host rows."""
        words = self.row_bytes // 8
        if side_by_side:
            first = (host_rows.long() * self.layers + layer) * words
        else:
            first = (host_rows.long() + layer * self.num_rows) * words
        return (first[:, None] + torch.arange(words, device="cuda")) * SCRAMBLE

    def fresh_rows(self, table: torch.Tensor, num_rows: int, num_lists: int) -> list[torch.Tensor]:
        """Lists of host rows of random positions, `num_rows` or more, request by request like a step's
        plan."""
        each = -(-num_rows // table.shape[0])
        lists = []
        for _ in range(num_lists):
            position = torch.randint(0, POSITIONS, (table.shape[0], each), device="cuda")
            lists.append(rows_of(table, position).int().reshape(-1))
        return lists


def rows_of(table: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
    """Host rows [batch, k] of positions [batch, k] by host blocks [batch, pages]."""
    position = topk.long()
    return table.gather(1, position // BLOCK_SIZE).long() * BLOCK_SIZE + position % BLOCK_SIZE
