"""Memory that requests need, and how many requests of the maximum length fit. Exact integer arithmetic.

A request is either fully resident (one block of each part a page) or host-backed (a hot region and the active
tail in each part); its indexer keys are on the device in both cases. A request that is being admitted holds
the pages of the prefill steps in flight on top, because a page leaves the device only after it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vllm_hisparse.config import MIB, HiSparseConfig

from .geometry import ceil_div
from .layout import LayerPlan

STATE_SHARE = 16  # resolver state takes at most one part in this many of the pool's bytes
MIN_STATE_BYTES = 64 * MIB  # or this much, in small pools


@dataclass(frozen=True)
class RequestBlocks:
    """What one request needs. Pages and hot blocks count one part; a block holds one page of a part."""

    num_pages: int
    num_parts: int
    indexer_blocks: int
    tail_pages: int  # pages that decode steps in flight may still write
    chunk_pages: int  # pages that the prefill steps in flight fill
    floor_hot_blocks: int
    start_hot_blocks: int
    max_hot_blocks: int
    max_pages: int  # pages of the longest request that the engine takes
    state_bytes: int  # resolver state of one hot region, over all index groups

    @property
    def admission_pages(self) -> int:
        """Blocks a part during admission: the request's pages, or a hot region, tail and chunk if fewer."""
        return min(self.num_pages, self.start_hot_blocks + self.tail_pages + self.chunk_pages)

    @property
    def admission_blocks(self) -> int:
        """Device blocks of a request that is being admitted."""
        return self.indexer_blocks + self.num_parts * self.admission_pages

    @property
    def resident_blocks(self) -> int:
        """Device blocks of a fully resident request."""
        return self.indexer_blocks + self.num_parts * self.num_pages

    def steady_blocks(self, hot_blocks: int) -> int:
        """Device blocks of a decoding request: host-backed with `hot_blocks` a part, resident if fewer."""
        return self.indexer_blocks + self.num_parts * min(self.num_pages, hot_blocks + self.tail_pages)

    def num_regions(self, num_device_blocks: int, block_stride_bytes: int, max_requests: int) -> int:
        """Hot regions that may exist at a time, at least one and at most one a request.

        The pool has to hold a floor and a tail in every part for each; their resolver state is a bounded
        share.
        """
        fit = (num_device_blocks - 1) // (self.num_parts * (self.floor_hot_blocks + self.tail_pages))
        budget = max(MIN_STATE_BYTES, num_device_blocks * block_stride_bytes // STATE_SHARE)
        return max(1, min(max_requests, fit, budget // self.state_bytes))


def active_tail_pages(rows_in_flight: int, page_tokens: int) -> int:
    """Pages at a decoding request's end that steps in flight may write: that many rows from within a page."""
    return 1 + ceil_div(rows_in_flight, page_tokens)


def request_blocks(vllm_config: Any, plan: LayerPlan, num_tokens: int | None = None) -> RequestBlocks:
    """What a request of `num_tokens` tokens needs; of `max_model_len` by default."""
    config = HiSparseConfig.from_vllm_config(vllm_config)
    page = plan.page_tokens
    max_tokens = int(vllm_config.model_config.max_model_len)
    tokens = max_tokens if num_tokens is None else num_tokens
    max_pages = ceil_div(max_tokens, page)
    in_flight = int(vllm_config.max_in_flight_tokens)
    steps = ceil_div(in_flight, int(vllm_config.scheduler_config.max_num_batched_tokens))
    hot = [
        min(max_pages, ceil_div(rows, page))
        for rows in (config.floor_hot_rows, config.start_hot_rows, config.max_hot_rows)
    ]
    return RequestBlocks(
        num_pages=ceil_div(tokens, page),
        num_parts=plan.num_parts,
        indexer_blocks=ceil_div(tokens, page * plan.indexer_pages),
        tail_pages=active_tail_pages(config.verify_rows * steps, page),
        chunk_pages=ceil_div(min(in_flight, tokens), page),
        floor_hot_blocks=hot[0],
        start_hot_blocks=hot[1],
        max_hot_blocks=hot[2],
        max_pages=max_pages,
        state_bytes=state_bytes(len(plan.index_groups), max_pages * page, hot[2] * page),
    )


def state_bytes(num_groups: int, num_positions: int, num_slots: int) -> int:
    """Resolver state of one hot region over `num_groups` index groups.

    Position -> slot (int16), slot -> position and eviction key (int32 each), clock (int32).
    """
    return num_groups * (2 * num_positions + 8 * num_slots + 4)


def result_bytes(plan: LayerPlan, top_k: int, max_tokens: int, max_requests: int, planned_rows: int) -> int:
    """What a resolver writes in a step, for one index group: the next one may reuse it.

    Physical rows of a selection (int32 [parts of a group, tokens, top_k]) and the plan of its misses (two
    int32 [requests, planned rows]); counts are small.
    """
    rows = max(len(parts) for parts in plan.group_parts) * max_tokens * top_k
    return 4 * (rows + 2 * max_requests * planned_rows)


def table_bytes(need: RequestBlocks, num_regions: int, max_requests: int) -> int:
    """Resident and host block tables of all requests, and the hot blocks of all regions (int32)."""
    resident_and_host = (need.num_parts + 1) * max_requests * need.max_pages
    return 4 * (resident_and_host + need.num_parts * num_regions * need.max_hot_blocks)


@dataclass(frozen=True)
class Concurrency:
    """Requests of one length that fit at a time, by resource."""

    device: Fraction
    host: Fraction
    num_regions: int
    max_requests: int

    @property
    def value(self) -> Fraction:
        """Requests that fit in every resource."""
        return min(limit for limit, _ in self._limits())

    @property
    def limit(self) -> str:
        """The resource that ends first: "device", "host", "regions" or "max_num_seqs"."""
        return min(self._limits(), key=lambda pair: pair[0])[1]

    def _limits(self) -> list[tuple[Fraction, str]]:
        return [
            (Fraction(self.max_requests), "max_num_seqs"),
            (self.device, "device"),
            (self.host, "host"),
            (Fraction(self.num_regions), "regions"),
        ]


def admission_concurrency(
    need: RequestBlocks, num_device_blocks: int, num_host_blocks: int, max_requests: int
) -> Concurrency:
    """Requests that fit if all were admitted at once. One block of each pool is its null block."""
    return Concurrency(
        Fraction(num_device_blocks - 1, need.admission_blocks),
        Fraction(num_host_blocks - 1, need.num_pages),
        max_requests,
        max_requests,
    )


def steady_concurrency(
    need: RequestBlocks,
    num_device_blocks: int,
    num_host_blocks: int,
    num_regions: int,
    max_requests: int,
    hot_blocks: int,
) -> Concurrency:
    """Requests that fit when one is being admitted and the others decode with hot regions of `hot_blocks`."""
    usable = num_device_blocks - 1
    if usable < need.admission_blocks:
        device = Fraction(usable, need.admission_blocks)
    else:
        device = 1 + Fraction(usable - need.admission_blocks, need.steady_blocks(hot_blocks))
    regions = max_requests if need.num_pages <= hot_blocks + need.tail_pages else num_regions
    return Concurrency(device, Fraction(num_host_blocks - 1, need.num_pages), regions, max_requests)
