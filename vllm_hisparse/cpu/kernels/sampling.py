"""Kernels of Model Runner V2's sampler.

A row's result does not depend on its place in the batch: what is not exact is computed row by row.
"""

# ruff: noqa: N803 - the parameters are those of vLLM's kernels

from __future__ import annotations

import numpy as np
import torch


def topk_log_softmax(
    output_ptr: torch.Tensor,  # fp32 [rows, topk]: written
    logits_ptr: torch.Tensor,  # [rows, vocabulary], any float type
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,  # [rows, topk]
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Log-probabilities of some tokens of each row, summed up in the kernel's order: block by block."""
    output, ids = output_ptr.numpy(), topk_ids_ptr.numpy()
    padded = np.empty(-(-vocab_size // BLOCK_SIZE) * BLOCK_SIZE, dtype=np.float32)
    for row, logits in enumerate(logits_ptr.float().numpy()):
        highest = np.fmax.reduce(logits)
        padded[:vocab_size], padded[vocab_size:] = logits, -np.inf
        total = np.float32(0)
        for block in np.exp(padded - highest).reshape(-1, BLOCK_SIZE):
            total += np.sum(block)
        output[row] = logits[ids[row]] - highest - np.log(total)


def ranks(
    output_ptr: torch.Tensor,  # [rows]: written
    logits_ptr: torch.Tensor,  # [rows, vocabulary]
    logits_stride: int,
    token_ids_ptr: torch.Tensor,  # [rows]
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """How many of a row's logits are no less than a token's.

    Right for bfloat16, too, which the interpreter compares as integers.
    """
    logits = logits_ptr[:, :vocab_size]
    output_ptr.copy_((logits >= logits.gather(1, token_ids_ptr.long().unsqueeze(1))).sum(1))


def gumbel_sample(
    local_argmax_ptr: torch.Tensor,  # [rows, blocks]: written
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,  # [rows, blocks]: written
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,  # [max_num_reqs, columns, vocabulary]: written
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,  # [rows, vocabulary], any float type
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,  # [rows], request or -1
    seeds_ptr: torch.Tensor,  # [max_num_reqs]
    pos_ptr: torch.Tensor,  # [rows]
    temp_ptr: torch.Tensor,  # [max_num_reqs]
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> tuple[int, int] | None:
    """The first greatest logit of each block of each row. Left to the kernel: whatever draws at random."""
    num_rows, num_blocks = local_argmax_ptr.shape
    rows = expanded_idx_mapping_ptr
    drawn = bool(temp_ptr[rows[rows >= 0]].any())
    if drawn or logits_cache_ptr is not None or bool(logits_ptr.isnan().any()):
        return num_rows, num_blocks
    padded = np.full((num_rows, num_blocks * BLOCK_SIZE), -np.inf, dtype=np.float32)
    padded[:, :vocab_size] = logits_ptr.float().numpy()
    blocks = padded.reshape(num_rows, num_blocks, BLOCK_SIZE)
    best = blocks.argmax(2)  # the first of equal ones
    local_max_ptr.numpy()[:] = np.take_along_axis(blocks, best[:, :, None], 2)[:, :, 0]
    local_argmax_ptr.numpy()[:] = best + np.arange(num_blocks) * BLOCK_SIZE
    return None
