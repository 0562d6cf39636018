"""The stand-ins of the block tables' kernels against the interpreted ones, on the same tensors."""

import numpy as np
import pytest
import torch

from vllm_hisparse.cpu import kernels
from vllm_hisparse.cpu.kernels import blocks

kernels.register()

PAD = -1
SIZES, STRIDES, MAX_REQS, MAX_TOKENS = (64, 16, 128), (5, 9, 3), 6, 50
NUM_GROUPS = len(SIZES)


def tables(generator: torch.Generator) -> list[torch.Tensor]:
    """A block table a group, [MAX_REQS, stride]."""
    return [torch.randint(0, 99, (MAX_REQS, s), dtype=torch.int32, generator=generator) for s in STRIDES]


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("requests", "lens"),
    [
        ([2], [1]),
        ([3, 0, 5], [4, 1, 20]),
        ([3, -1, 0, 4], [2, 5, 1, 1]),  # a request without blocks
        ([-1, -1], [3, 1]),
        ([1, 2], [0, 7]),  # no token
    ],
)
def test_slot_mappings(requests: list[int], lens: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(requests))
    held = tables(generator)
    starts = torch.tensor([0, *lens, 0, 0], dtype=torch.int32).cumsum(0).int()  # as long as the runner's
    positions = torch.randint(0, 144, (MAX_TOKENS,), generator=generator)  # all groups have these blocks
    results = []
    for kernel in (kernels.originals[blocks.compute_slot_mappings][(NUM_GROUPS, len(requests) + 1)],
                   blocks.compute_slot_mappings):  # fmt: skip
        slots = torch.full((NUM_GROUPS, MAX_TOKENS), 77)
        kernel(
            MAX_TOKENS,
            torch.tensor(requests, dtype=dtype),
            starts,
            positions,
            addresses(held),
            torch.tensor(STRIDES),
            torch.tensor(SIZES, dtype=torch.int32),
            torch.tensor([True, True, False]),
            torch.ones(NUM_GROUPS, dtype=torch.bool),
            slots,
            slots.stride(0),
            0,
            CP_SIZE=1,
            CP_INTERLEAVE=1,
            PAD_ID=PAD,
            TRITON_BLOCK_SIZE=16,
        )
        results.append(slots)
    assert torch.equal(*results)
    assert (results[0][:, sum(lens) :] == PAD).all() and (results[0][2] == PAD).all()


@pytest.mark.parametrize(("requests", "num_padded"), [([4], 1), ([5, 0, 3], 3), ([1, 2], 5)])
def test_gathered_tables(requests: list[int], num_padded: int) -> None:
    generator = torch.Generator().manual_seed(num_padded)
    held = tables(generator)
    num_blocks = torch.stack([torch.randint(0, s + 1, (MAX_REQS,), generator=generator) for s in STRIDES])
    num_blocks = num_blocks.int()
    results = []
    for kernel in (kernels.originals[blocks.gather_block_tables][(NUM_GROUPS, num_padded)],
                   blocks.gather_block_tables):  # fmt: skip
        gathered = [
            torch.full_like(table, 77) for table in held
        ]  # what a row had before stays behind its blocks
        kernel(
            torch.tensor(requests, dtype=torch.int32),
            addresses(held),
            addresses(gathered),
            torch.tensor(STRIDES),
            num_blocks,
            num_blocks.stride(0),
            len(requests),
            BLOCK_SIZE=4,
        )
        results.append(gathered)
    for interpreted, ours in zip(*results, strict=True):
        assert torch.equal(interpreted[:num_padded], ours[:num_padded])
        assert not ours[num_padded:].any()


WRITES = [
    (0, 3, 0, [5, 6]),
    (2, 1, 2, [9]),
    (1, 4, 1, [1, 2, 3, 4, 5, 6]),
    (0, 3, 1, [7, 8]),
]  # the last overlaps


def staged(writes: list[tuple[int, int, int, list[int]]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, first columns, contents, ends."""
    _, rows, columns, contents = zip(*writes, strict=True)
    flat = torch.tensor([element for content in contents for element in content], dtype=dtype)
    ends = np.cumsum([len(content) for content in contents])
    return (*(torch.tensor(x, dtype=torch.int32) for x in (rows, columns)), flat, torch.tensor(ends).int())


def test_writes_into_several_tables() -> None:
    results = []
    for kernel in kernels.originals[blocks.apply_write][(len(WRITES),)], blocks.apply_write:
        written = [torch.zeros(MAX_REQS, stride, dtype=torch.int32) for stride in STRIDES]
        groups = torch.tensor([group for group, *_ in WRITES], dtype=torch.int32)
        strides = torch.tensor(STRIDES)
        kernel(
            addresses(written), strides, *staged(WRITES, torch.int32), groups, BLOCK_SIZE=4, MULTI_GROUP=True
        )
        results.append(written)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert results[0][0][3].tolist() == [5, 7, 8, 0, 0]


@pytest.mark.parametrize("shape", [(MAX_REQS, 9), (MAX_REQS,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_writes_into_one_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    writes = WRITES if len(shape) > 1 else [(0, 3, 0, [5]), (0, 1, 0, [7])]
    results = []
    for kernel in kernels.originals[blocks.apply_write][(len(writes),)], blocks.apply_write:
        written = torch.zeros(shape, dtype=dtype)
        kernel(written, written.stride(0), *staged(writes, dtype), None, BLOCK_SIZE=4, MULTI_GROUP=False)
        results.append(written)
    assert torch.equal(*results)
    assert results[0].any()
