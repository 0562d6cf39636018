"""vLLM on CUDA made comparable bit by bit, for tests and benchmarks.

Three things stand in the way. vLLM's top-k kernels let atomics decide in which order they write a selection
and which of equal scores they take, so two runs of one engine differ: selections can be made without chance.
And two things vLLM does otherwise as soon as HiSparse is on, its own or ours; a reference can be made to do
them alike: a row is rounded to bf16 between being normalised and being quantised, where one fused kernel does
both otherwise; and a prefill of few tokens runs in the prefill kernels, not in the decode kernel.

Replayed selections have a locality that random weights do not.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "Replay",
    "prefill_in_prefill_kernels",
    "replay_selections",
    "select_without_chance",
    "top_k",
    "write_rows_in_two_steps",
]

LAST = torch.iinfo(torch.int32).max
ROWS_AT_ONCE = 1024  # of a prefill: bounds the memory that a selection takes


def select_without_chance() -> None:
    """Replace the indexer's top-k kernels by `top_k`, for the rest of the process.

    Raises ImportError where vLLM has no CUDA indexer of the form that 0.33 has.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

    def prefill(logits: torch.Tensor, starts: Any, ends: torch.Tensor, topk: torch.Tensor, *_: Any) -> None:
        for first in range(
            0, logits.shape[0], ROWS_AT_ONCE
        ):  # `starts` are 0: a row's logits begin with its context
            rows = slice(first, first + ROWS_AT_ONCE)
            top_k(logits[rows], ends[rows], topk[rows])

    def decode(
        self: Any, logits: torch.Tensor, lens: torch.Tensor, next_n: int, topk: torch.Tensor, *_: Any
    ) -> None:
        top_k(logits, self._row_ends(lens, next_n, logits.shape[0]), topk)

    _custom_ops.top_k_per_row_prefill = prefill
    SparseIndexerTopk.forward = decode


def top_k(logits: torch.Tensor, ends: torch.Tensor, topk: torch.Tensor) -> None:
    """Write the K highest of the first `ends` int32 [T] of `logits` [T, width] to `topk` int32 [T, K]:
    ascending, padded
    with -1; of equal scores the first ones. Shapes do not depend on values, so it can be captured in a graph.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    inside = columns < ends.unsqueeze(1)
    scores = logits.masked_fill(~inside, -torch.inf)
    num = min(topk.shape[1], logits.shape[1])
    threshold = scores.topk(num, dim=-1).values[:, -1:]
    above, equal = inside & (scores > threshold), inside & (scores == threshold)
    chosen = above | (equal & (equal.cumsum(-1) <= num - above.sum(-1, keepdim=True)))
    positions = torch.where(chosen, columns, LAST).topk(num, dim=-1, largest=False).values
    topk.fill_(-1)
    topk[:, :num] = torch.where(positions == LAST, -1, positions)


def write_rows_in_two_steps() -> None:
    """Let vLLM without HiSparse quantise rows from bf16, for the rest of the process."""
    from vllm import _custom_ops
    from vllm.models.deepseek_v32 import attention

    fused = attention.fused_norm_rope

    def in_two_steps(*args: Any, mla_kv_cache: torch.Tensor | None, **options: Any) -> torch.Tensor:
        result = fused(*args, mla_kv_cache=None, **options)
        slots = options["slot_mapping"]
        if mla_kv_cache is not None and slots is not None:
            _custom_ops.concat_and_cache_mla(
                options["kv_c_out"][: slots.numel()],
                options["k_pe_out"][: slots.numel()],
                mla_kv_cache,
                slots.flatten(),
                kv_cache_dtype=options["mla_kv_cache_dtype"],
                scale=options["mla_k_scale"],
                skip_scale=options["skip_scale"],
            )
        return result

    attention.fused_norm_rope = in_two_steps


def prefill_in_prefill_kernels() -> None:
    """Let vLLM without HiSparse run prefills in the prefill kernels however short they are, for the rest of
    the process: a tail behind cached pages would run in the decode kernel, whose sums come in another order.
    """
    from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonMetadataBuilder

    split = SparseMLACommonMetadataBuilder._init_reorder_batch_threshold

    def split_by_one(self: Any, threshold: int | None = 1, *args: Any, **options: Any) -> None:
        split(self, 1, *args, **options)

    SparseMLACommonMetadataBuilder._init_reorder_batch_threshold = split_by_one


class Replay:
    """Selections of decode steps, `churn` of each fresh: int32 [leaders, steps, rows, K] on the device.

    Fresh positions are uniform over the context. With a region of 2 K rows and exact LRU, nearly all of them
    miss and everything else hits. The last step is followed by the first, which misses altogether.
    """

    def __init__(
        self,
        *,
        num_leaders: int,
        num_steps: int,
        num_rows: int,
        top_k: int,
        context: int,
        churn: float,
        device: str = "cuda",
    ) -> None:
        self.num_leaders = num_leaders
        shape = (num_leaders, num_steps, num_rows, top_k)
        self.selections = torch.empty(shape, dtype=torch.int32, device=device)
        generator = torch.Generator(device).manual_seed(1)
        num_fresh = round(churn * top_k)
        for leader in range(num_leaders):
            for row in range(num_rows):
                # A permutation of the context, read on: distinct positions, and fresh ones come from all over
                # it.
                order = torch.randperm(context, generator=generator, device=device)
                chosen, cursor = order[:top_k].clone(), top_k
                for step in range(num_steps):
                    if step:
                        leaving = torch.randperm(top_k, generator=generator, device=device)[:num_fresh]
                        arriving = torch.arange(cursor, cursor + num_fresh, device=device) % context
                        chosen[leaving] = order[arriving]
                        cursor += num_fresh
                    self.selections[leader, step, row] = chosen.int()
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_calls = 0

    def write(self, topk: torch.Tensor) -> None:
        """The next leader's selection of the step into int32 [T, K]; T up to the rows there are."""
        leader = self._num_calls % self.num_leaders
        self._num_calls += 1
        if leader == 0:
            self._step.add_(1).remainder_(self.selections.shape[1])
        topk.copy_(self.selections[leader].index_select(0, self._step)[0, : topk.shape[0]])


def replay_selections(replay: Replay) -> None:
    """Let decodes read `replay` after the indexer has done its work, for the rest of the process."""
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

    decode = SparseIndexerTopk.forward

    def replayed(self: Any, logits: Any, lens: Any, next_n: int, topk: torch.Tensor, *rest: Any) -> None:
        decode(self, logits, lens, next_n, topk, *rest)
        if 0 < topk.shape[0] <= replay.selections.shape[2]:
            replay.write(topk)

    SparseIndexerTopk.forward = replayed
