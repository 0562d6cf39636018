"""fetch, write_pages, read_pages and gather_pages against the reference, also past 2^31 bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.case import batch_rows, first_difference, int32
from vllm_hisparse import ops

GIB = 2**30
POISON = 0xA5


@dataclass
class Layers:
    """Layers of two index groups over two parts; on the host each group's layers lie side by side."""

    block_size: int = 4
    row_bytes: int = 24
    num_blocks: int = 30
    num_host_blocks: int = 20

    @property
    def part(self) -> torch.Tensor:
        return torch.tensor([0, 0, 1, 0, 1], dtype=torch.int32)

    @property
    def offset(self) -> torch.Tensor:
        """Device layout: layers of a part one after the other, in another order than on the host."""
        return torch.tensor([2, 0, 1, 1, 0]) * self.page_bytes

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def block_stride_bytes(self) -> int:
        return 3 * self.page_bytes + self.row_bytes

    @property
    def host_offset(self) -> torch.Tensor:
        group_1 = self.num_host_blocks * self.block_size * 3 * self.row_bytes
        return torch.tensor([0, 1, 2, 0, 1]) * self.row_bytes + torch.tensor([0, 0, 0, group_1, group_1])

    @property
    def host_row_stride(self) -> torch.Tensor:
        return torch.tensor([3, 3, 3, 2, 2]) * self.row_bytes

    def memory(self, random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        host_bytes = self.num_host_blocks * self.block_size * 5 * self.row_bytes
        pool = random.integers(0, 256, self.num_blocks * self.block_stride_bytes, dtype=np.uint8)
        return torch.from_numpy(pool), torch.from_numpy(random.integers(0, 256, host_bytes, dtype=np.uint8))

    def pages(self, random: np.random.Generator, num_pages: int) -> dict[str, torch.Tensor]:
        blocks = random.permutation(self.num_blocks)[: 2 * num_pages].reshape(2, num_pages)
        host_blocks = random.permutation(self.num_host_blocks)[:num_pages]
        blocks[0, random.random(num_pages) < 0.1] = -1
        host_blocks[random.random(num_pages) < 0.1] = -1
        return {
            "page_blocks": torch.tensor(blocks, dtype=torch.int32),
            "host_blocks": torch.tensor(host_blocks, dtype=torch.int32),
        }

    def arguments(self) -> dict[str, object]:
        return {
            "layer_offset": self.offset,
            "layer_part": self.part,
            "host_offset": self.host_offset,
            "host_row_stride": self.host_row_stride,
            "row_bytes": self.row_bytes,
            "block_size": self.block_size,
            "block_stride_bytes": self.block_stride_bytes,
        }


def assert_equal(got: torch.Tensor, want: torch.Tensor, name: str = "memory") -> None:
    difference = first_difference(name, got, want)
    assert difference is None, difference


@pytest.mark.parametrize("name", ["write_pages", "read_pages"])
@pytest.mark.parametrize(("seed", "num_pages"), [(0, 0), (1, 1), (2, 7), (3, 15)])
def test_pages_of_all_layers(name: str, seed: int, num_pages: int) -> None:
    random = np.random.default_rng(seed)
    layers = Layers()
    pool, host = layers.memory(random)
    pages = layers.pages(random, num_pages)
    want_pool, want_host = pool.clone(), host.clone()
    getattr(ops, name)(pool=pool, host=host, **pages, **layers.arguments())
    getattr(ops.reference, name)(pool=want_pool, host=want_host, **pages, **layers.arguments())
    assert_equal(pool, want_pool, "pool")
    assert_equal(host, want_host, "host")


def test_a_page_written_and_read_back_elsewhere_is_the_same() -> None:
    random = np.random.default_rng(5)
    layers = Layers()
    pool, host = layers.memory(random)
    host_blocks = torch.tensor([3, 9], dtype=torch.int32)
    blocks = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    other = torch.tensor([[11, 12], [13, 14]], dtype=torch.int32)
    ops.write_pages(pool=pool, host=host, page_blocks=blocks, host_blocks=host_blocks, **layers.arguments())
    ops.read_pages(pool=pool, host=host, page_blocks=other, host_blocks=host_blocks, **layers.arguments())
    stride = layers.block_stride_bytes
    for part, offset in zip(layers.part.tolist(), layers.offset.tolist(), strict=True):
        for i in range(2):
            page = pool[int(blocks[part, i]) * stride + offset :][: layers.page_bytes]
            again = pool[int(other[part, i]) * stride + offset :][: layers.page_bytes]
            assert_equal(again, page, "page")


def test_gather_takes_each_page_from_where_it_is() -> None:
    random = np.random.default_rng(6)
    layers = Layers()
    pool, host = layers.memory(random)
    arguments = {
        "device_blocks": torch.tensor([4, -1, -1, 0], dtype=torch.int32),
        "host_blocks": torch.tensor([2, 7, -1, -1], dtype=torch.int32),
        "layer_offset": int(layers.offset[2]),
        "host_offset": int(layers.host_offset[2]),
        "host_row_stride": int(layers.host_row_stride[2]),
        "row_bytes": layers.row_bytes,
        "block_size": layers.block_size,
        "block_stride_bytes": layers.block_stride_bytes,
    }
    got = torch.full((5 * layers.block_size, layers.row_bytes), POISON, dtype=torch.uint8)
    want = got.clone()
    ops.gather_pages(pool=pool, host=host, staging=got, **arguments)
    ops.reference.gather_pages(pool=pool, host=host, staging=want, **arguments)
    assert_equal(got, want, "staging")
    pages = got.view(5, layers.block_size, layers.row_bytes)
    assert (pages[2] == POISON).all()
    assert (pages[4] == POISON).all()
    assert not (pages[1] == POISON).all()


def plan_of(random: np.random.Generator, num_host_rows: int, num_slots: int) -> dict[str, torch.Tensor]:
    """Three batch rows of the middle region, none and the first; the plan's tail is poisoned."""
    plan = {
        "plan_host_row": int32(4, 8),
        "plan_slot": int32(4, 8),
        "plan_count": torch.tensor([5, 0, 8], dtype=torch.int32),
        "batch": batch_rows(torch.tensor([1, -1, 0, -1]), torch.arange(2), torch.tensor([12, 12])),
    }
    for r, count in ((0, 5), (2, 8)):
        plan["plan_host_row"][r, :count] = torch.tensor(random.permutation(num_host_rows)[:count])
        plan["plan_slot"][r, :count] = torch.tensor(np.sort(random.permutation(num_slots)[:count]))
    return plan


def selection_of(num_parts: int) -> dict[str, torch.Tensor | int]:
    """What `resolve` might have been given for `plan_of`; a fetch with it moves what the plan says."""
    return {
        "topk": torch.arange(24, dtype=torch.int32).view(3, 8),
        "query_start": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        "resident": int32(num_parts, 2, 6, fill=-1),
        "host": torch.arange(12, dtype=torch.int32).view(2, 6),
        "slot_of": torch.full((2, 24), -1, dtype=torch.int16),
        "part": 0,
    }


@pytest.mark.parametrize("skip_io", [False, True])
@pytest.mark.parametrize("name", ["fetch", "fetch_selected"])
def test_fetch(name: str, skip_io: bool) -> None:
    random = np.random.default_rng(8)
    layers = Layers()
    pool, _ = layers.memory(random)
    group_host = torch.from_numpy(random.integers(0, 256, (80, 3 * layers.row_bytes), dtype=np.uint8))
    hot = torch.tensor(random.permutation(layers.num_blocks)[:12].reshape(2, 2, 3), dtype=torch.int32)
    arguments = {
        "group_host": group_host,
        "layer_offset": layers.offset[:3],
        "layer_part": layers.part[:3],
        **plan_of(random, 80, 3 * layers.block_size),
        "hot": hot,
        "row_bytes": layers.row_bytes,
        "block_size": layers.block_size,
        "block_stride_bytes": layers.block_stride_bytes,
        "skip_io": skip_io,
    }
    if name == "fetch_selected":
        arguments |= selection_of(2)
    before, want = pool.clone(), pool.clone()
    getattr(ops, name)(pool=pool, **arguments)
    getattr(ops.reference, name)(pool=want, **arguments)
    assert_equal(pool, want, "pool")
    assert torch.equal(pool, before) == skip_io


@pytest.fixture
def sparse(tmp_path: Path) -> Callable[[str, int], torch.Tensor]:
    """Memory over a sparse file: only what is touched takes space."""

    def make(name: str, num_bytes: int) -> torch.Tensor:
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(num_bytes)
        return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)

    return make


def test_pages_past_two_and_four_gib(sparse: Callable[[str, int], torch.Tensor]) -> None:
    random = np.random.default_rng(9)
    block_size, row_bytes, num_layers = 64, 656, 4
    stride = num_layers * row_bytes
    pool, host = sparse("pool", 5 * GIB), sparse("host", 6 * GIB)
    last_block = 5 * GIB // (block_size * stride) - 1
    last_host_block = 6 * GIB // (block_size * stride) - 1
    blocks = torch.tensor([[0, 2 * GIB // (block_size * stride) + 1, last_block]], dtype=torch.int32)
    host_blocks = torch.tensor([last_host_block, 4 * GIB // (block_size * stride) + 1, 1], dtype=torch.int32)
    pages = []
    for block in blocks[0].tolist():
        page = torch.from_numpy(random.integers(0, 256, block_size * stride, dtype=np.uint8))
        pool[block * block_size * stride :][: len(page)] = page
        pages.append(page.view(num_layers, block_size, row_bytes))
    arguments = {
        "page_blocks": blocks,
        "host_blocks": host_blocks,
        "layer_offset": torch.arange(num_layers) * block_size * row_bytes,
        "layer_part": torch.zeros(num_layers, dtype=torch.int32),
        "host_offset": torch.arange(num_layers) * row_bytes,
        "host_row_stride": torch.full((num_layers,), stride),
        "row_bytes": row_bytes,
        "block_size": block_size,
        "block_stride_bytes": block_size * stride,
    }
    ops.write_pages(pool=pool, host=host, **arguments)
    for page, host_block in zip(pages, host_blocks.tolist(), strict=True):
        at_host = host[host_block * block_size * stride :][: block_size * stride]
        assert_equal(at_host.view(block_size, num_layers, row_bytes), page.transpose(0, 1), "host page")
    pool_again = sparse("pool_again", 5 * GIB)
    ops.read_pages(pool=pool_again, host=host, **arguments)
    for page, block in zip(pages, blocks[0].tolist(), strict=True):
        got = pool_again[block * block_size * stride :][: block_size * stride]
        assert_equal(got.view(num_layers, block_size, row_bytes), page, "device page")
    staging = torch.zeros(3 * block_size, row_bytes, dtype=torch.uint8)
    ops.gather_pages(
        pool, host, staging, torch.tensor([-1, -1, last_block], dtype=torch.int32), host_blocks,
        2 * block_size * row_bytes, 2 * row_bytes, stride, row_bytes, block_size, block_size * stride,
    )  # fmt: skip
    assert_equal(staging, torch.cat([page[2] for page in pages]), "staging")


def test_fetch_past_two_and_four_gib(sparse: Callable[[str, int], torch.Tensor]) -> None:
    random = np.random.default_rng(10)
    block_size, row_bytes, num_layers = 64, 656, 2
    group_row_bytes, block_bytes = num_layers * row_bytes, block_size * num_layers * row_bytes
    pool, memory = sparse("pool", 5 * GIB), sparse("host", 5 * GIB)
    group_host = memory[: 5 * GIB // group_row_bytes * group_row_bytes].view(-1, group_row_bytes)
    host_rows = torch.tensor([[len(group_host) - 1, 2 * GIB // group_row_bytes + 3, 0]], dtype=torch.int32)
    group_host[host_rows[0].long()] = torch.from_numpy(
        random.integers(1, 256, (3, group_row_bytes), dtype=np.uint8)
    )
    hot = torch.tensor([[[0, 5 * GIB // block_bytes - 1]]], dtype=torch.int32)
    slots = torch.tensor([[3, 64, 127]], dtype=torch.int32)
    ops.fetch(
        group_host=group_host,
        pool=pool,
        layer_offset=torch.tensor([0, block_size * row_bytes]),
        layer_part=torch.zeros(2, dtype=torch.int32),
        plan_host_row=host_rows,
        plan_slot=slots,
        plan_count=int32(1, fill=3),
        batch=batch_rows(torch.zeros(1), torch.zeros(1), torch.full((1,), 128)),
        hot=hot,
        row_bytes=row_bytes,
        block_size=block_size,
        block_stride_bytes=block_bytes,
    )
    for host_row, slot in zip(host_rows[0].tolist(), slots[0].tolist(), strict=True):
        block = pool[int(hot[0, 0, slot // block_size]) * block_bytes :][:block_bytes]
        row = block.view(num_layers, block_size, row_bytes)[:, slot % block_size]
        assert_equal(row.reshape(-1), group_host[host_row], f"row of slot {slot}")
