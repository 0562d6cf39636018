"""Block tables in kernel blocks are what vLLM's own method makes, and stay where graphs read them."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_hisparse.runtime.kernel_blocks import with_kernel_block_table

PAGES, MAX_REQUESTS, MAX_BLOCKS = 5, 4, 6


def group_of(stride: int) -> AttentionGroup:
    backend: Any = None
    spec: Any = SimpleNamespace(block_size=64 * PAGES)
    group = AttentionGroup(backend, [], spec, 0, kernel_block_size=64, kernel_block_stride=stride)
    group.kernel_block_offsets = torch.arange(PAGES, dtype=torch.int32)
    group.kernel_block_table = torch.full((2, MAX_REQUESTS, MAX_BLOCKS * PAGES), -1, dtype=torch.int32)
    return group


def metadata_of(block_table: torch.Tensor) -> CommonAttentionMetadata:
    some = torch.arange(3)
    return CommonAttentionMetadata(
        query_start_loc=some, query_start_loc_cpu=some, seq_lens=some, num_reqs=len(block_table),
        num_actual_tokens=7, max_query_len=2, max_seq_len=9, block_table_tensor=block_table,
        slot_mapping=some,
    )  # fmt: skip


@pytest.mark.parametrize("stride", [0, 8])
def test_the_mapped_table_is_vllms(stride: int) -> None:
    group, generator = group_of(stride), torch.Generator().manual_seed(1)
    for rows, cols, ubatch in ((4, 6, 0), (2, 3, 0), (4, 6, 1), (4, 6, 0), (1, 1, 1)):
        table = torch.randint(0, 1000, (rows, cols), dtype=torch.int32, generator=generator)
        given = metadata_of(table)
        got = with_kernel_block_table(group, given, ubatch)
        want = group.map_to_kernel_block_table(table, ubatch)  # writes to the same place
        expected = (table[..., None] * (stride or PAGES) + torch.arange(PAGES)).flatten(1)
        assert torch.equal(got.block_table_tensor, want)
        assert torch.equal(got.block_table_tensor, expected.int())
        assert got.block_table_tensor.data_ptr() == want.data_ptr()
        assert given.block_table_tensor is table
        others = [f.name for f in fields(given) if f.name != "block_table_tensor"]
        assert all(getattr(got, name) is getattr(given, name) for name in others)


def test_a_table_that_was_made_anew_is_the_one_that_is_written() -> None:
    group = group_of(0)
    given = metadata_of(torch.ones(2, 2, dtype=torch.int32))
    with_kernel_block_table(group, given)
    group.kernel_block_table = torch.zeros(1, MAX_REQUESTS, MAX_BLOCKS * PAGES, dtype=torch.int32)
    got = with_kernel_block_table(group, given)
    assert got.block_table_tensor.data_ptr() == group.kernel_block_table.data_ptr()
    assert got.block_table_tensor.tolist() == [[5, 6, 7, 8, 9] * 2] * 2


def test_without_kernel_blocks_of_its_own_nothing_is_made() -> None:
    group = group_of(0)
    group.kernel_block_size = None
    given = metadata_of(torch.ones(2, 2, dtype=torch.int32))
    assert with_kernel_block_table(group, given) is given
