"""Kernels of Model Runner V2 that prepare a step's inputs and take in what it sampled.

A request has a place in the batch, and a row in the tensors that hold the requests' state: `idx_mapping_ptr`
maps the one to the other.
"""

# ruff: noqa: N803 - the parameters are those of vLLM's kernels

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Integers = npt.NDArray[np.integer]


def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,  # [tokens]: written
    next_prefill_tokens_ptr: torch.Tensor,  # [num_lookahead, max_num_reqs]: written
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,  # [requests]
    query_start_loc_ptr: torch.Tensor,  # [at least requests + 1]
    all_token_ids_ptr: torch.Tensor,  # [max_num_reqs, max_model_len]
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,  # [max_num_reqs]
    num_computed_tokens_ptr: torch.Tensor,  # [max_num_reqs]
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """The prompt's tokens of this step, and the first few of the next, 0 behind the prompt's end."""
    input_ids, following = input_ids_ptr.numpy(), next_prefill_tokens_ptr.numpy()
    starts = query_start_loc_ptr.tolist()
    for place, row in enumerate(idx_mapping_ptr.tolist()):
        prefill_len, computed = int(prefill_lens_ptr[row]), int(num_computed_tokens_ptr[row])
        if computed >= prefill_len:
            continue
        start, stop = starts[place : place + 2]
        tokens = all_token_ids_ptr[row].numpy()
        end = computed + stop - start
        input_ids[start:stop] = tokens[computed:end]
        ahead = tokens[end : min(end + num_lookahead, prefill_len)]
        following[:num_lookahead, row] = 0
        following[: len(ahead), row] = ahead


def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,  # [tokens]: written
    seq_lens_ptr: torch.Tensor,  # [max_num_reqs], by place: written, 0 behind the last request
    idx_mapping_ptr: torch.Tensor,  # [requests]
    query_start_loc_ptr: torch.Tensor,  # [at least requests + 1]
    num_computed_tokens_ptr: torch.Tensor,  # [max_num_reqs]
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions of the step's tokens, and the requests' lengths with them."""
    num_reqs = idx_mapping_ptr.shape[0]
    computed = num_computed_tokens_ptr.numpy()[idx_mapping_ptr.numpy()]
    starts = query_start_loc_ptr[: num_reqs + 1].numpy()
    lens = np.diff(starts)
    seq_lens = seq_lens_ptr.numpy()
    seq_lens[:num_reqs] = computed + lens
    seq_lens[num_reqs:max_num_reqs] = 0
    place, offset = _spread(lens)
    pos_ptr.numpy()[starts[0] : starts[-1]] = computed[place] + offset


def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,  # [tokens]: written
    idx_mapping_ptr: torch.Tensor,  # [requests]
    last_sampled_tokens_ptr: torch.Tensor,  # [max_num_reqs, 1]
    query_start_loc_ptr: torch.Tensor,  # [at least requests + 1]
    seq_lens_ptr: torch.Tensor,  # [max_num_reqs], by place
    prefill_len_ptr: torch.Tensor,  # [max_num_reqs], by row
    draft_tokens_ptr: torch.Tensor,  # [max_num_reqs, drafts]
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,  # [requests + 1]
    logits_indices_ptr: torch.Tensor,  # [logits]: written
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Tokens whose logits are wanted: a request's last ones. Past the prompt they are written, too: the token
    sampled last, then the drafts."""
    rows = idx_mapping_ptr.numpy()
    input_ids, num_reqs = input_ids_ptr.numpy(), len(rows)
    cu_num_logits = cu_num_logits_ptr[: num_reqs + 1].numpy()
    num_logits = np.diff(cu_num_logits)
    ends = query_start_loc_ptr[1 : num_reqs + 1].numpy()
    first = ends - num_logits
    place, offset = _spread(num_logits)
    logits_indices_ptr.numpy()[cu_num_logits[0] : cu_num_logits[-1]] = first[place] + offset

    seq_lens, prefill_lens = seq_lens_ptr[:num_reqs].numpy(), prefill_len_ptr.numpy()[rows]
    if NUM_NEW_SAMPLED_TOKENS:
        past = np.flatnonzero((seq_lens > prefill_lens) & (seq_lens - num_logits >= prefill_lens))
        input_ids[first[past]] = last_sampled_tokens_ptr.view(-1).numpy()[rows[past]]
    num_drafts = np.where(seq_lens > prefill_lens, num_logits - NUM_NEW_SAMPLED_TOKENS, 0).clip(0)
    place, offset = _spread(num_drafts)
    input_ids[(ends - num_drafts)[place] + offset] = draft_tokens_ptr.numpy()[rows[place], offset]


def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,  # [requests]
    expanded_idx_mapping_ptr: torch.Tensor,  # [logits]: written
    expanded_local_pos_ptr: torch.Tensor,  # [logits]: written
    cu_num_logits_ptr: torch.Tensor,  # [at least requests + 1]
    BLOCK_SIZE: int,
) -> None:
    """The row of every logit's request, and the logit's number among the request's."""
    num_reqs = idx_mapping_ptr.shape[0]
    cu_num_logits = cu_num_logits_ptr[: num_reqs + 1].numpy()
    place, offset = _spread(np.diff(cu_num_logits))
    written = slice(cu_num_logits[0], cu_num_logits[-1])
    expanded_idx_mapping_ptr.numpy()[written] = idx_mapping_ptr.numpy()[place]
    expanded_local_pos_ptr.numpy()[written] = offset


def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,  # [requests]: set to 0 where the prompt is not through
    num_rejected_ptr: torch.Tensor,  # [requests]: written
    seq_lens_ptr: torch.Tensor,  # [at least requests], by place
    cu_num_logits_ptr: torch.Tensor,  # [at least requests + 1]
    idx_mapping_ptr: torch.Tensor,  # [requests]
    prefill_len_ptr: torch.Tensor,  # [max_num_reqs], by row
) -> None:
    """How many of a request's logits gave a token, and how many did not."""
    num_reqs = idx_mapping_ptr.shape[0]
    sampled, seq_lens = num_sampled_ptr.numpy()[:num_reqs], seq_lens_ptr.numpy()[:num_reqs]
    chunk = seq_lens < prefill_len_ptr.numpy()[idx_mapping_ptr.numpy()]
    sampled[chunk] = 0
    num_logits = np.diff(cu_num_logits_ptr[: num_reqs + 1].numpy())
    num_rejected_ptr.numpy()[:num_reqs] = np.where(chunk, 0, num_logits - sampled)


def post_update(
    idx_mapping_ptr: torch.Tensor,  # [requests], -1 for one to leave alone
    num_computed_tokens_ptr: torch.Tensor,  # [max_num_reqs]: written
    last_sampled_tokens_ptr: torch.Tensor,  # [max_num_reqs, 1]: written
    output_bin_counts_ptr: torch.Tensor | None,  # [max_num_reqs, vocabulary]: written
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,  # [requests, drafts + 1]
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,  # [requests]
    num_rejected_ptr: torch.Tensor,  # [requests]
    query_start_loc_ptr: torch.Tensor | None,  # [at least requests + 1]
    all_token_ids_ptr: torch.Tensor,  # [max_num_reqs, max_model_len]: written
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,  # [max_num_reqs]: written
    **launch: Any,
) -> None:
    """Appends the sampled tokens to their requests."""
    num_reqs = idx_mapping_ptr.shape[0]
    real = np.flatnonzero(idx_mapping_ptr.numpy() >= 0)
    rows = idx_mapping_ptr.numpy()[real]
    sampled, num_sampled = sampled_tokens_ptr.numpy(), num_sampled_ptr.numpy()[real]
    place, offset = _spread(num_sampled)
    tokens = sampled[real[place], offset]
    total = total_len_ptr.numpy()
    all_token_ids_ptr.numpy()[rows[place], total[rows[place]] + offset] = tokens
    if output_bin_counts_ptr is not None:
        np.add.at(output_bin_counts_ptr.numpy(), (rows[place], tokens), 1)

    some = np.flatnonzero(num_sampled > 0)
    last_sampled_tokens_ptr.view(-1).numpy()[rows[some]] = sampled[real[some], num_sampled[some] - 1]
    total[rows[some]] += num_sampled[some]
    delta = -num_rejected_ptr.numpy()[real]
    if query_start_loc_ptr is not None:
        delta = delta + np.diff(query_start_loc_ptr[: num_reqs + 1].numpy())[real]
    num_computed_tokens_ptr.numpy()[rows] += delta


def _spread(counts: Integers) -> tuple[Integers, Integers]:
    """For `counts` [n]: every place as often as counted, and beside it a running number from 0."""
    place = np.repeat(np.arange(len(counts)), counts)
    return place, np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
