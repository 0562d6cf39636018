"""The requests of the engine tests, and how their outputs are compared."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_hisparse.testing.engine import Completion, random_prompts
from vllm_hisparse.testing.harness import Prompt
from vllm_hisparse.testing.models import TinyModel

ModelPath = Callable[[TinyModel], Path]
Reference = Callable[[TinyModel, str], list[Completion]]  # of `WORDS`, by model and dtype

NUM_TOKENS = 48  # of every reference; a request for fewer gives the first of them
ENGINE_ARGS: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 8}


def _words() -> list[tuple[int, ...]]:
    """Two families that share a prefix each; the first returns after others have pushed it off the device."""
    first = random_prompts(5, 20, 200, seed=1, shared=140)
    second = random_prompts(4, 40, 200, seed=2, shared=140)
    alone = random_prompts(1, 200, 300, seed=3)
    return [tuple(words) for words in (*first[:3], *second, *alone, *first[3:])]


WORDS = _words()


def prompts(num_tokens: int | Sequence[int] = (32, 20, 28, 24), count: int = len(WORDS)) -> list[Prompt]:
    """The first `count` requests; `num_tokens` are dealt out in turn."""
    lengths = [num_tokens] if isinstance(num_tokens, int) else num_tokens
    return [Prompt(words, lengths[i % len(lengths)]) for i, words in enumerate(WORDS[:count])]


def differences(completions: Sequence[Completion], reference: Sequence[Completion]) -> list[str]:
    """For each request that is not bitwise equal to the start of its reference: where it first differs."""
    found = []
    for i, (mine, other) in enumerate(zip(completions, reference, strict=False)):
        for step, (token, logprobs) in enumerate(zip(mine.token_ids, mine.logprobs, strict=True)):
            if (token, logprobs) != (other.token_ids[step], other.logprobs[step]):
                found.append(
                    f"request {i}, token {step}: {token} {logprobs}, "
                    f"reference {other.token_ids[step]} {other.logprobs[step]}"
                )
                break
    return found
