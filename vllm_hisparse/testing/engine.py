"""Engines in this process, their outputs as values that compare bit by bit, and prompts for them."""

from __future__ import annotations

import atexit
import gc
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

FIRST_WORD = 3  # the tokens before it are special
NUM_LOGPROBS = 3

_engines = 0  # that are up
_modules = 0  # that have been frozen

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 256,
    "kv_cache_memory_bytes": 256 << 20,
    "disable_log_stats": False,  # keeps the counters
    "seed": 0,
}


@dataclass(frozen=True)
class Completion:
    """What a request produced."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]  # of the best tokens, by token id


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[LLM]:
    """An LLM in this process, taken down on exit. `options` stand before `DEFAULTS`.

    One that fails to start leaves nothing to the next either: vLLM's workers keep their connector and their
    process groups in globals, and an engine that finds a connector there makes none of its own.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    with patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}), _modules_frozen():
        llm = None
        try:
            llm = LLM(str(model), **{**DEFAULTS, **options})
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
                del llm
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()


@contextmanager
def _modules_frozen() -> Iterator[None]:
    """Garbage collections in here pass over what was imported before.

    An engine collects a dozen times while it starts and stops, and each time goes through all that torch and
    vLLM consist of, a third of a second. vLLM's own freeze and thaw are off: they take in the engine itself,
    and give back everything.
    """
    global _engines, _modules
    if not _engines and len(sys.modules) > _modules:
        if not _modules:
            atexit.register(
                gc.unfreeze
            )  # Triton's extension looks at the process's end for what was not freed
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)
    _engines += 1
    try:
        with patch.object(gc, "freeze", lambda: None), patch.object(gc, "unfreeze", lambda: None):
            yield
    finally:
        _engines -= 1


def complete(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    num_tokens: int | Sequence[int],
    transfers: Sequence[dict[str, Any]] | None = None,
) -> list[Completion]:
    """Greedy completions of `num_tokens` each, of all prompts at once.

    `transfers`: kv_transfer_params of each prompt that another engine has computed.
    """
    lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    params = [greedy(n) for n in lengths]
    if transfers is not None:
        for param, transfer in zip(params, transfers, strict=True):
            param.extra_args = {"kv_transfer_params": transfer}
    results = llm.generate(requests, params, use_tqdm=False)
    return [completion(result) for result in results]


def greedy(num_tokens: int) -> SamplingParams:
    """Sampling parameters of exactly `num_tokens` tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=NUM_LOGPROBS
    )


def completion(result: RequestOutput) -> Completion:
    """What a finished request produced."""
    (output,) = result.outputs
    return Completion(
        tuple(output.token_ids),
        tuple(tuple(sorted((t, p.logprob) for t, p in step.items())) for step in output.logprobs),
    )


def counters(llm: LLM) -> dict[str, float]:
    """vLLM's counters by name, summed over labels."""
    from vllm.v1.metrics.reader import Counter

    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            values[metric.name] = values.get(metric.name, 0) + metric.value
    return values


def random_prompts(
    count: int, shortest: int, longest: int, *, seed: int = 0, shared: int = 0, vocab_size: int = 512
) -> list[list[int]]:
    """Prompts of random words with random lengths, after `shared` words that all of them begin with."""
    rng = random.Random(seed)

    def words(n: int) -> list[int]:
        return [rng.randrange(FIRST_WORD, vocab_size) for _ in range(n)]

    prefix = words(shared)
    return [prefix + words(rng.randint(shortest, longest)) for _ in range(count)]
