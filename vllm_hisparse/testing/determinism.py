"""vLLM on CUDA made comparable bit by bit, for tests and benchmarks.

Two things stand in the way. vLLM's top-k kernels write a selection in whatever order their atomics give, so
that attention adds in another order each time and two runs of one engine differ in their last bits:
selections can be sorted. And without HiSparse one fused kernel normalises a row and quantises it, while with
HiSparse the row is rounded to bf16 in between, as vLLM's own HiSparse does it: a reference can be made to
write rows in the same two steps.

Replayed selections have a locality that random weights do not.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Replay", "replay_selections", "sort_selections", "write_rows_in_two_steps"]

LAST = torch.iinfo(torch.int32).max


def sort_selections() -> None:
    """Sort every selection by position, padding last, for the rest of the process.

    Raises ImportError where vLLM has no CUDA indexer of the form that 0.33 has.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

    prefill, decode = _custom_ops.top_k_per_row_prefill, SparseIndexerTopk.forward

    def sorted_prefill(logits: Any, starts: Any, ends: Any, topk: torch.Tensor, *rest: Any) -> None:
        prefill(logits, starts, ends, topk, *rest)
        _sort(topk)

    def sorted_decode(self: Any, logits: Any, lens: Any, next_n: int, topk: torch.Tensor, *rest: Any) -> None:
        decode(self, logits, lens, next_n, topk, *rest)
        _sort(topk)

    _custom_ops.top_k_per_row_prefill = sorted_prefill
    SparseIndexerTopk.forward = sorted_decode


def _sort(topk: torch.Tensor) -> None:
    """int32 [T, K] in place; capturable."""
    ordered = torch.where(topk < 0, LAST, topk).sort(dim=-1).values
    topk.copy_(torch.where(ordered == LAST, -1, ordered))


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


class Replay:
    """Selections of decode steps, `churn` of each fresh: int32 [leaders, steps, rows, K] on the device.

    Fresh positions are uniform over the context. With a region of 2 K rows and exact LRU, nearly all of them
    miss and everything else hits. The last step is followed by the first, which misses altogether.
    """

    def __init__(
        self, *, num_leaders: int, num_steps: int, num_rows: int, top_k: int, context: int, churn: float
    ) -> None:
        self.num_leaders = num_leaders
        shape = (num_leaders, num_steps, num_rows, top_k)
        self.selections = torch.empty(shape, dtype=torch.int32, device="cuda")
        generator = torch.Generator("cuda").manual_seed(1)
        num_fresh = round(churn * top_k)
        for leader in range(num_leaders):
            for row in range(num_rows):
                # A permutation of the context, read on: distinct positions, and fresh ones come from all over
                # it.
                order = torch.randperm(context, generator=generator, device="cuda")
                chosen, cursor = order[:top_k].clone(), top_k
                for step in range(num_steps):
                    if step:
                        leaving = torch.randperm(top_k, generator=generator, device="cuda")[:num_fresh]
                        arriving = torch.arange(cursor, cursor + num_fresh, device="cuda") % context
                        chosen[leaving] = order[arriving]
                        cursor += num_fresh
                    self.selections[leader, step, row] = chosen.int()
        self._step = torch.zeros(1, dtype=torch.int64, device="cuda")
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
