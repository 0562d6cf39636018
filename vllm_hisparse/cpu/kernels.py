"""Stand-ins for Triton kernels of the indexer, which the interpreter cannot run (fp8) or runs slowly.

Each takes the launch arguments of the kernel it replaces, in the kernel's order, and is checked against a
plain reference in the tests.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

CHUNK_KERNEL = "vllm.v1.attention.backends.mla.indexer.BuildPrefillChunkMetadataKernel.kernel"
QUANTIZE_KERNEL = "vllm.model_executor.layers.quantization.utils.fp8_utils._per_token_group_quant_fp8"

_registered = False


def register() -> None:
    """Routes vLLM's launches to the stand-ins. Idempotent: a second registration would only warn."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.triton_utils.dispatcher import register_kernels

    stand_ins = {CHUNK_KERNEL: build_prefill_chunk_metadata, QUANTIZE_KERNEL: quantize_groups}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it looks at every attribute of every module
        register_kernels(stand_ins)


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
    y: torch.Tensor,  # [..., n * group_size]
    y_q: torch.Tensor,  # fp8, same shape: written
    y_s: torch.Tensor,  # fp32, one per group, row-major: written
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
    values, scales = quantize(y.reshape(-1, group_size), eps, use_ue8m0)
    y_q.view(-1, group_size).copy_(values)
    y_s.view(-1).copy_(scales)


def build_prefill_chunk_metadata(
    query_start_loc: torch.Tensor,  # [requests + 1], relative to the chunk
    seq_lens: torch.Tensor,  # [requests]
    cu_seq_lens: torch.Tensor,  # [requests + 1], where each request's keys start among the chunk's keys
    row_start: torch.Tensor,  # [requests + 1], the same without context parallelism
    token_to_seq: torch.Tensor,  # [keys of the chunk]: written
    cu_seq_len_ks: torch.Tensor,  # [query rows of the slice], first key of each row: written
    cu_seq_len_ke: torch.Tensor,  # [query rows of the slice], end of each row's keys: written
    query_slice_start: int,
    query_slice_stop: int,
    dcp_rank: int,
    dcp_world: int,
    dcp_interleave: int,
    block_size: int,
    compress_ratio: int,
) -> None:
    """Key ranges of a prefill chunk's query rows, and the request of each of its keys."""
    assert dcp_world == 1, "the CPU platform admits no context parallelism"
    num_reqs = seq_lens.shape[0]
    starts, query_lens = query_start_loc[:-1], query_start_loc.diff()
    rows = torch.arange(query_slice_start, min(query_slice_stop, int(query_start_loc[-1])))
    request = torch.repeat_interleave(torch.arange(num_reqs), query_lens.long())[rows]
    position = rows - starts[request] + (seq_lens - query_lens)[request]
    cu_seq_len_ks.copy_(row_start[request])
    cu_seq_len_ke.copy_(row_start[request] + (position + 1) // compress_ratio)
    token_to_seq.copy_(torch.repeat_interleave(torch.arange(num_reqs), cu_seq_lens.diff().long()))
