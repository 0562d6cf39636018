"""fetch, write_pages, read_pages and gather_pages against the CPU op, and beyond 2^31 bytes."""

import pytest
import torch

from tests.ops.case import batch_rows

pytestmark = pytest.mark.gpu
ops = torch.ops.hisparse


def random_bytes(*shape: int, pin: bool = False) -> torch.Tensor:
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    return data.pin_memory() if pin else data


class Layers:
    """L layers in groups of `group`: side by side in a host row, in part l // per_part of a device page."""

    def __init__(
        self, num_layers: int, group: int, parts: int, row_bytes: int, block_size: int, host_blocks: int
    ):
        layer = torch.arange(num_layers)
        per_part = -(-num_layers // parts)
        page_bytes = row_bytes * block_size
        self.offset = layer % per_part * page_bytes
        self.part = (layer // per_part).int()
        self.stride_bytes = per_part * page_bytes + 2 * row_bytes  # a multiple of row_bytes with slack
        width = torch.tensor([min(group, num_layers - int(first)) for first in layer // group * group])
        self.host_stride = width * row_bytes
        self.host_offset = layer // group * group * page_bytes * host_blocks + layer % group * row_bytes
        self.host_bytes = num_layers * page_bytes * host_blocks

    def on(self, device: str) -> list[torch.Tensor]:
        return [t.to(device) for t in (self.offset, self.part, self.host_offset, self.host_stride)]


CASES = [  # layers, group, parts, row bytes, block size, pages
    (1, 1, 1, 16, 1, 1),
    (1, 1, 1, 656, 64, 9),
    (4, 4, 1, 656, 64, 5),
    (8, 4, 2, 656, 64, 7),
    (7, 3, 2, 1152, 64, 6),
    (61, 4, 3, 576, 64, 3),
    (5, 2, 5, 48, 24, 11),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("to_host", [True, False], ids=["write", "read"])
def test_pages_equal_the_cpu_op(case: tuple[int, ...], to_host: bool) -> None:
    num_layers, group, parts, row_bytes, block_size, pages = case
    host_blocks, device_blocks = pages + 4, parts * pages + 3
    layers = Layers(num_layers, group, parts, row_bytes, block_size, host_blocks)
    pool = random_bytes(device_blocks * layers.stride_bytes)
    host = random_bytes(layers.host_bytes, pin=True)
    page_blocks = torch.randperm(device_blocks)[: parts * pages].view(parts, pages).int()
    chosen = torch.randperm(host_blocks)[:pages].int()
    if pages > 4:
        page_blocks[:, 2] = -1
        chosen[3] = -1
    want_pool, want_host = pool.clone(), host.clone()
    tail = (row_bytes, block_size, layers.stride_bytes)
    op = ops.write_pages if to_host else ops.read_pages
    op(want_pool, want_host, page_blocks, chosen, *layers.on("cpu"), *tail)
    got_pool = pool.cuda()
    op(got_pool, host, page_blocks.cuda(), chosen.cuda(), *layers.on("cuda"), *tail)
    torch.cuda.synchronize()
    assert torch.equal(got_pool.cpu(), want_pool)
    assert torch.equal(host, want_host)


@pytest.mark.parametrize(("row_bytes", "block_size"), [(16, 1), (656, 64), (1152, 64), (48, 24)])
def test_gather_equals_the_cpu_op(row_bytes: int, block_size: int) -> None:
    pages, blocks, stride = 9, 12, 3 * row_bytes
    pool = random_bytes(blocks * 2 * block_size * row_bytes)
    host = random_bytes(blocks * block_size * stride, pin=True)
    device_blocks, host_blocks = torch.randperm(blocks)[:pages].int(), torch.randperm(blocks)[:pages].int()
    device_blocks[::2] = -1
    host_blocks[4] = -1
    staging = random_bytes(pages * block_size + 5, row_bytes)
    want, got = staging.clone(), staging.cuda()
    offset = block_size * row_bytes
    tail = (offset, row_bytes, stride, row_bytes, block_size, 2 * block_size * row_bytes)
    ops.gather_pages(pool, host, want, device_blocks, host_blocks, *tail)
    ops.gather_pages(pool.cuda(), host, got, device_blocks.cuda(), host_blocks.cuda(), *tail)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("row_bytes", [16, 512, 656, 1152, 2624, 65536])
@pytest.mark.parametrize("num_layers", [1, 4, 5])
@pytest.mark.parametrize("batch", [1, 7, 700])
def test_fetch_equals_the_cpu_op(row_bytes: int, num_layers: int, batch: int) -> None:
    block_size, slots, host_rows = 8, 16, 64
    parts = 2 if num_layers > 1 else 1
    per_part = -(-num_layers // parts)
    stride = per_part * block_size * row_bytes
    blocks = slots // block_size * parts * batch
    if blocks * stride > 2**30:
        pytest.skip("the CPU side would need more than 1 GiB")
    layer = torch.arange(num_layers)
    offset, part = layer % per_part * block_size * row_bytes, (layer // per_part).int()
    group_host = random_bytes(host_rows, num_layers * row_bytes, pin=True)
    plan_host_row = torch.randint(0, host_rows, (batch, slots)).int()
    plan_slot = torch.stack([torch.randperm(slots) for _ in range(batch)]).int()
    plan_count = torch.randint(0, slots + 1, (batch,)).int()
    hot = torch.randperm(blocks).view(parts, batch, -1).int()
    rows = batch_rows(torch.randperm(batch), torch.randperm(batch), torch.full((batch,), slots))
    pool = torch.zeros(blocks * stride, dtype=torch.uint8)
    tables = (plan_host_row, plan_slot, plan_count, rows, hot)
    got = pool.cuda()
    on_device = [t.cuda() for t in (offset, part, *tables)]
    ops.fetch(group_host, got, *on_device, row_bytes, block_size, stride, True)
    assert not got.any()  # skip_io
    ops.fetch(group_host, got, *on_device, row_bytes, block_size, stride, False)
    ops.fetch(group_host, pool, offset, part, *tables, row_bytes, block_size, stride, False)
    assert torch.equal(got.cpu(), pool)


def test_offsets_beyond_2_to_the_31() -> None:
    """A pool and a host area of 5 GiB each; the last rows and pages of both."""
    row_bytes, block_size = 656, 64
    stride = 2 * block_size * row_bytes
    blocks = 5 * 2**30 // stride
    host_rows = 5 * 2**30 // row_bytes // block_size * block_size
    group_host = torch.empty(host_rows, row_bytes, dtype=torch.uint8, pin_memory=True)
    group_host[-block_size:] = random_bytes(block_size, row_bytes)
    pool = torch.zeros(blocks * stride, dtype=torch.uint8, device="cuda")
    one = {"dtype": torch.int32, "device": "cuda"}
    offset = torch.tensor([block_size * row_bytes], device="cuda")
    zero, last = torch.zeros(1, **one), torch.tensor([blocks - 1], **one)
    plan = torch.tensor([[host_rows - 1, host_rows - 2]], **one), torch.tensor([[5, 63]], **one)
    ops.fetch(group_host, pool, offset, zero, *plan, torch.tensor([2], **one),
              torch.tensor([[0, 0, 64, 0]], **one), last.view(1, 1, 1),
              row_bytes, block_size, stride, False)  # fmt: skip
    rows = pool[(blocks - 1) * stride + block_size * row_bytes :].view(block_size, row_bytes)
    assert torch.equal(rows[5].cpu(), group_host[-1])
    assert torch.equal(rows[63].cpu(), group_host[-2])

    host_block = torch.tensor([host_rows // block_size - 1], **one)
    flat = group_host.view(-1)
    layer = (offset, zero, torch.zeros(1, dtype=torch.int64, device="cuda"),
             torch.tensor([row_bytes], device="cuda"))  # fmt: skip
    ops.read_pages(pool, flat, last.view(1, 1), host_block, *layer, row_bytes, block_size, stride)
    assert torch.equal(rows.cpu(), group_host[-block_size:])
    rows.copy_(random_bytes(block_size, row_bytes))
    ops.write_pages(pool, flat, last.view(1, 1), host_block, *layer, row_bytes, block_size, stride)
    torch.cuda.synchronize()
    assert torch.equal(rows.cpu(), group_host[-block_size:])
