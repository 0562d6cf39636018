"""Kernels of Model Runner V2's block tables.

A table comes as the address of an int32 tensor [max_num_reqs, stride] that vLLM owns. It is viewed in place,
for the length of a call.
"""

# ruff: noqa: N803 - the parameters are those of vLLM's kernels

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,  # [requests], row in the tables, or -1 for a request without blocks
    query_start_loc: torch.Tensor,  # [at least requests + 1]
    pos: torch.Tensor,  # [tokens]
    block_table_ptrs: torch.Tensor,  # [groups], addresses
    block_table_strides: torch.Tensor,  # [groups]
    block_sizes: torch.Tensor,  # [groups]
    slot_mapping_enabled: torch.Tensor,  # [groups]
    dcp_sharded: torch.Tensor,  # [groups]
    slot_mappings_ptr: torch.Tensor,  # [groups, max_num_tokens]: written
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """The slot of every token in every group; PAD_ID where there is none, and behind the last token."""
    assert CP_SIZE == 1, "the CPU platform admits no context parallelism"
    starts = query_start_loc[: idx_mapping.shape[0] + 1].numpy()
    first, last = int(starts[0]), int(starts[-1])
    rows = np.repeat(idx_mapping.numpy().astype(np.int64), np.diff(starts))
    real = np.flatnonzero(rows >= 0)
    rows, positions = rows[real], pos[first:last].numpy()[real]
    num_rows = int(rows.max(initial=-1)) + 1
    slots = slot_mappings_ptr.numpy()
    slots[:, first:max_num_tokens] = PAD_ID
    groups = _lists(block_table_ptrs, block_table_strides, block_sizes, slot_mapping_enabled)
    for group, (address, stride, size, enabled) in enumerate(groups):
        if enabled:
            numbers = _words(address, num_rows * stride)[rows * stride + positions // size]
            slots[group, first + real] = numbers.astype(np.int64) * size + positions % size


def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,  # [at least num_reqs], row in the source tables
    src_block_table_ptrs: torch.Tensor,  # [groups], addresses
    dst_block_table_ptrs: torch.Tensor,  # [groups], addresses; the tables are written
    block_table_strides: torch.Tensor,  # [groups]
    num_blocks_ptr: torch.Tensor,  # [groups, max_num_reqs]
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copies the blocks that the batch's requests have, in the batch's order. The rows behind are zeroed.

    The kernel zeroes only as many as the launch's grid says. Nobody reads the rest.
    """
    rows = batch_idx_to_req_idx[:num_reqs].numpy()
    num_blocks = num_blocks_ptr.numpy()
    shape = num_blocks.shape[1], -1
    groups = _lists(src_block_table_ptrs, dst_block_table_ptrs, block_table_strides)
    for group, (source, target, stride) in enumerate(groups):
        table = _words(source, shape[0] * stride).reshape(shape)
        gathered = _words(target, shape[0] * stride).reshape(shape)
        held = np.arange(stride) < num_blocks[group, rows, None]
        np.copyto(gathered[:num_reqs], table[rows], where=held)
        gathered[num_reqs:] = 0


def apply_write(
    output_ptr: torch.Tensor,  # MULTI_GROUP: [groups], addresses of tables; else a contiguous tensor: written
    output_stride: Any,  # MULTI_GROUP: tensor [groups]; else int
    write_indices_ptr: torch.Tensor,  # [writes], row
    write_starts_ptr: torch.Tensor,  # [writes], first column
    write_contents_ptr: torch.Tensor,  # [elements], one write's after the other's
    write_cu_lens_ptr: torch.Tensor,  # [writes], end of each write's elements
    write_group_ids_ptr: torch.Tensor | None,  # [writes] if MULTI_GROUP
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Writes runs of elements into rows."""
    contents = write_contents_ptr.numpy()
    begin = 0
    for write, (row, start, end) in enumerate(_lists(write_indices_ptr, write_starts_ptr, write_cu_lens_ptr)):
        content, begin = contents[begin:end], end
        if MULTI_GROUP:
            assert write_group_ids_ptr is not None
            group = int(write_group_ids_ptr[write])
            first = row * int(output_stride[group]) + start
            _words(int(output_ptr[group]) + 4 * first, len(content))[:] = content
        else:
            first = row * output_stride + start
            output_ptr.view(-1)[first : first + len(content)].numpy()[:] = content


def _lists(*columns: torch.Tensor) -> Any:
    """Rows of Python numbers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def _words(address: int, count: int) -> npt.NDArray[np.int32]:
    """View of `count` int32 of vLLM's."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))
