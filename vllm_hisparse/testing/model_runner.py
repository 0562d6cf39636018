"""A model without layers: digests for rows, and a sampler that depends on the whole context."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .engine_config import EngineOptions
from .ranks import Span

__all__ = ["VOCABULARY", "ModelRunner", "WorkerRequest", "sample", "verify"]

VOCABULARY = 40
INDEXER_GROUP = 1


@dataclass
class WorkerRequest:
    """What the model runner knows of a request.

    A token's rows are stood for by a digest of all tokens up to it and of the weights.
    """

    tokens: list[int]
    num_computed: int
    indexer_blocks: list[int]
    weights: int  # version of the model that computes it
    digests: list[int] = field(default_factory=list)

    def context(self, drafts: Sequence[int], end: int) -> list[int]:
        """Digests of the first `end` tokens, `drafts` following the known ones."""
        del self.digests[len(self.tokens) :]
        self.digests = self.extended(self.digests, self.tokens)
        return self.extended(self.digests, [*self.tokens, *drafts])[:end]

    def extended(self, digests: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """`digests` continued to all of `tokens`."""
        result = list(digests)
        for position in range(len(result), len(tokens)):
            result.append(hash((result[-1] if result else self.weights, position, tokens[position])) or 1)
        return result


def sample(digest: int) -> int:
    """The token that follows a context."""
    return digest // 7 % VOCABULARY


def verify(digests: list[int], num_known: int, drafts: list[int]) -> list[int]:
    """Tokens that a step samples: the accepted drafts and one more; none in the middle of a prompt."""
    if len(digests) < num_known:
        return []
    tokens = [sample(digests[num_known - 1])]
    for index, draft in enumerate(drafts):
        if draft != tokens[-1]:
            break
        tokens.append(sample(digests[num_known + index]))
    return tokens


class ModelRunner:
    """What vLLM's Model Runner V2 keeps from step to step: tokens and blocks of keys, by request."""

    def __init__(self, options: EngineOptions, seed: int) -> None:
        """`seed`: of drafts' luck."""
        self._is_optimistic = options.async_scheduling and options.num_drafts > 0
        self._random = random.Random(seed)
        self.requests: dict[str, WorkerRequest] = {}

    def run(
        self, output: Any, weights: int, num_shared: Callable[[str], int]
    ) -> tuple[list[Span], dict[str, list[int]]]:
        """A step of vLLM's SchedulerOutput. Returns what it computes, and the tokens that each request gets.

        `weights`: of the model, see `WorkerRequest`. `num_shared`: tokens at a request's start that it must
        not write.
        """
        self._update(output, weights)
        spans, sampled = [], {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            drafts = self._drafts(request, len(output.scheduled_spec_decode_tokens.get(request_id, ())))
            start, end = request.num_computed, request.num_computed + num_tokens
            shared = num_shared(request_id)
            assert start >= shared, f"{request_id} writes token {start} of {shared} that it shares"
            assert end <= len(request.tokens) + len(drafts), (request_id, end)
            digests = request.context(drafts, end)
            spans.append(Span(request_id, digests, start, list(request.indexer_blocks)))
            sampled[request_id] = verify(digests, len(request.tokens), drafts)
            request.num_computed = end
            if new := sampled[request_id]:
                request.tokens += new
                request.num_computed = len(request.tokens) - 1
        return spans, sampled

    def _update(self, output: Any, weights: int) -> None:
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = WorkerRequest(
                list(new.prefill_token_ids),
                new.num_computed_tokens,
                list(new.block_ids[INDEXER_GROUP]),
                weights,
            )
        cached = output.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "Model Runner V2 sees resumed requests as new ones"
        for request_id, num_computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self.requests[request_id]
            assert self._is_optimistic or request.num_computed == num_computed, request_id
            if blocks is not None:
                request.indexer_blocks += blocks[INDEXER_GROUP]

    def _drafts(self, request: WorkerRequest, num_drafts: int) -> list[int]:
        """As many drafts, each right three times out of four."""
        digests = request.context([], len(request.tokens))
        drafts: list[int] = []
        for _ in range(num_drafts):
            right = sample(digests[-1])
            drafts.append(right if self._random.random() < 0.75 else (right + 1) % VOCABULARY)
            digests = request.extended(digests, [*request.tokens, *drafts])
        return drafts
