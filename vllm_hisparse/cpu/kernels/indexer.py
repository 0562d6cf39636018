"""The indexer's kernels, which the interpreter cannot run (fp8) or runs slowly."""

# ruff: noqa: N803 - the parameters are those of vLLM's kernels

from __future__ import annotations

from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def quantize(x: torch.Tensor, eps: float, power_of_two_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and scales of the last dimension's vectors.

    Every step is exact or correctly rounded, so that a vector's result does not depend on its place in `x`.

    Args:
        x: [..., n], any float type.
        eps: lower bound of a vector's absolute maximum.
        power_of_two_scale: round scales up to a power of two.

    Returns:
        fp8 e4m3 [..., n] and fp32 [...], with `x` close to values * scale.
    """
    x = x.float()
    scale = x.abs().amax(-1).clamp_min(eps) / FP8_MAX
    if power_of_two_scale:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    values = (x / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values, scale


def quantize_groups(
    y_ptr: torch.Tensor,  # [..., n * group_size]
    y_q_ptr: torch.Tensor,  # fp8, same shape: written
    y_s_ptr: torch.Tensor,  # fp32, one per group, row-major: written
    group_size: int,
    y_num_columns: int,
    y_row_stride: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    use_ue8m0: bool,
    **launch: Any,  # block size and the like
) -> None:
    """Quantises groups of `group_size` neighbours in a row, each with its own scale."""
    values, scales = quantize(y_ptr.reshape(-1, group_size), eps, use_ue8m0)
    y_q_ptr.view(-1, group_size).copy_(values)
    y_s_ptr.view(-1).copy_(scales)


def build_prefill_chunk_metadata(
    query_start_loc_ptr: torch.Tensor,  # [requests + 1], relative to the chunk
    uncompressed_seq_lens_ptr: torch.Tensor,  # [requests]
    cu_compressed_seq_lens_ptr: torch.Tensor,  # [requests + 1], each request's first key among the chunk's
    row_start_cu_compressed_seq_lens_ptr: torch.Tensor,  # [requests + 1], the same without parallel contexts
    token_to_seq_ptr: torch.Tensor,  # [keys of the chunk]: written
    cu_compressed_seq_len_ks_ptr: torch.Tensor,  # [query rows of the slice], first key of each row: written
    cu_compressed_seq_len_ke_ptr: torch.Tensor,  # [query rows of the slice], end of each row's keys: written
    query_slice_start: int,
    query_slice_stop: int,
    DCP_RANK: int,
    DCP_WORLD: int,
    DCP_INTERLEAVE: int,
    BLOCK_SIZE: int,
    COMPRESS_RATIO: int,
) -> None:
    """Key ranges of a prefill chunk's query rows, and the request of each of its keys."""
    assert DCP_WORLD == 1, "the CPU platform admits no context parallelism"
    seq_lens, row_start = uncompressed_seq_lens_ptr, row_start_cu_compressed_seq_lens_ptr
    num_reqs = seq_lens.shape[0]
    starts, query_lens = query_start_loc_ptr[:-1], query_start_loc_ptr.diff()
    rows = torch.arange(query_slice_start, min(query_slice_stop, int(query_start_loc_ptr[-1])))
    request = torch.repeat_interleave(torch.arange(num_reqs), query_lens.long())[rows]
    position = rows - starts[request] + (seq_lens - query_lens)[request]
    cu_compressed_seq_len_ks_ptr.copy_(row_start[request])
    cu_compressed_seq_len_ke_ptr.copy_(row_start[request] + (position + 1) // COMPRESS_RATIO)
    num_keys = cu_compressed_seq_lens_ptr.diff().long()
    token_to_seq_ptr.copy_(torch.repeat_interleave(torch.arange(num_reqs), num_keys))
