"""A model without layers: digests for rows, and a sampler that depends on the whole context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["VOCABULARY", "WorkerRequest", "sample", "verify"]

VOCABULARY = 40


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
