"""Time that steps and copies take on a node of eight H200, TP 8. A model: every number is an assumption
with a source.

A rank holds all KV (MLA is replicated) and has a host link of its own, so one rank stands for all.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, log

from vllm_hisparse.simulation.model import ServedModel

__all__ = ["Hardware", "miss_share"]

# Rows of the hot region / top-k -> share of selected rows that miss. From 2 on LRFU as measured on recorded
# selections; below, LRU's figures less the tenth that LRFU saves; at 1 what keeping only the current
# selection misses.
MISSES = (
    (1.0, 0.287),
    (1.25, 0.197),
    (1.5, 0.161),
    (2.0, 0.117),
    (3.0, 0.073),
    (4.0, 0.053),
    (6.0, 0.034),
    (8.0, 0.025),
)


def miss_share(ratio: float) -> float:
    """Share of the selected rows that a region of `ratio` times as many rows misses; 0 if nothing is
    selected there.

    Linear between the measured points in logarithms of both; past the last one it falls on as between the
    last two.
    """
    if ratio <= MISSES[0][0]:
        return MISSES[0][1]
    index = min(max(bisect_right([x for x, _ in MISSES], ratio), 1), len(MISSES) - 1)
    (x0, y0), (x1, y1) = MISSES[index - 1], MISSES[index]
    return exp(log(y0) + (log(y1) - log(y0)) * (log(ratio) - log(x0)) / (log(x1) - log(x0)))


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank and of the model it serves."""

    prefill_tokens_per_s: float = 12_000.0
    base_ms: float = 19.0  # a decode step of one request
    weight_ms: float = 18.5  # reading all expert weights of a rank: 89 GB at 4.8 TB/s
    num_experts: int = 256
    experts_per_token: int = 8
    memory_gbps: float = 4800.0  # HBM of one GPU
    to_device_gbps: float = 48.0  # misses, whole index groups a row
    to_host_gbps: float = 44.0  # rows of pages, written by GPU threads

    def decode_s(self, model: ServedModel, num_requests: int, context_tokens: int) -> float:
        """A decode step of `num_requests` requests with `context_tokens` tokens together, without host reads.

        Experts that any of the requests routes to are read, the selected rows, and all indexer keys.
        """
        if not num_requests:
            return 0.0
        touched = 1 - (1 - self.experts_per_token / self.num_experts) ** num_requests
        kv_bytes = num_requests * model.top_k * model.token_bytes + context_tokens * model.token_key_bytes
        return (self.base_ms + self.weight_ms * touched) / 1e3 + kv_bytes / (self.memory_gbps * 1e9)

    def prefill_s(self, num_tokens: int) -> float:
        """Prefill of that many tokens."""
        return num_tokens / self.prefill_tokens_per_s

    def missed_rows(self, model: ServedModel, host_share: float, hot_rows: int) -> float:
        """Rows that one request's selection misses in a step, in each index group.

        Selections are taken to fall on pages alike, so `host_share` of the selected rows are on the host
        alone, and the region holds rows of those only.
        """
        selected = model.top_k * host_share
        return selected * miss_share(hot_rows / selected) if selected > 0 else 0.0
