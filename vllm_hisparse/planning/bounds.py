"""Memory that requests need, and how many requests of the maximum length fit. Exact integer arithmetic.

A request is either fully resident (a block of each part a page) or host-backed (a hot region and the active tail in each
part); its indexer keys are on the device in both cases. A request that is being admitted holds one prefill step's pages
on top, because pages leave the device only after they were written.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from vllm_hisparse.config import HiSparseConfig
from vllm_hisparse.planning.geometry import ceil_div
from vllm_hisparse.planning.layout import LayerPlan


@dataclass(frozen=True)
class RequestBlocks:
    """Blocks that one request of `num_pages` pages needs. `*_blocks` of hot regions count one part."""

    num_pages: int
    num_parts: int
    indexer_blocks: int
    tail_pages: int  # pages that steps in flight may still write
    chunk_pages: int  # pages that the steps in flight of a prefill fill
    floor_hot_blocks: int
    start_hot_blocks: int
    max_hot_blocks: int

    @property
    def admission_pages(self) -> int:
        """Device blocks a part while the request is being admitted: all pages, or region, tail and chunk if fewer."""
        return min(self.num_pages, self.floor_hot_blocks + self.tail_pages + self.chunk_pages)

    @property
    def admission_blocks(self) -> int:
        """Device blocks of a request that is being admitted."""
        return self.indexer_blocks + self.num_parts * self.admission_pages

    def steady_blocks(self, hot_blocks: int) -> int:
        """Device blocks of a decoding request: host-backed with `hot_blocks` a part, or resident where that is less."""
        return self.indexer_blocks + self.num_parts * min(self.num_pages, hot_blocks + self.tail_pages)

    @property
    def resident_blocks(self) -> int:
        """Device blocks of a fully resident request."""
        return self.indexer_blocks + self.num_parts * self.num_pages

    def num_regions(self, num_device_blocks: int, max_requests: int) -> int:
        """Most hot regions that can exist at a time: each needs its floor and a tail in every part."""
        fit = (num_device_blocks - 1) // (self.num_parts * (self.floor_hot_blocks + self.tail_pages))
        return max(1, min(max_requests, fit))


def active_tail_pages(rows_in_flight: int, page_tokens: int) -> int:
    """Pages at a decoding request's end that steps in flight may write: the last `rows_in_flight` rows and the next."""
    return 1 + ceil_div(rows_in_flight, page_tokens)


def request_blocks(vllm_config: Any, plan: LayerPlan, num_tokens: int | None = None) -> RequestBlocks:
    """What a request of `num_tokens` tokens needs; of `max_model_len` by default."""
    config = HiSparseConfig.from_vllm_config(vllm_config)
    page = plan.page_tokens
    tokens = int(vllm_config.model_config.max_model_len) if num_tokens is None else num_tokens
    in_flight_steps = ceil_div(
        int(vllm_config.max_in_flight_tokens), int(vllm_config.scheduler_config.max_num_batched_tokens)
    )
    return RequestBlocks(
        num_pages=ceil_div(tokens, page),
        num_parts=plan.num_parts,
        indexer_blocks=ceil_div(tokens, page * plan.indexer_pages),
        tail_pages=active_tail_pages(config.verify_rows * in_flight_steps, page),
        chunk_pages=ceil_div(min(int(vllm_config.max_in_flight_tokens), tokens), page),
        floor_hot_blocks=ceil_div(config.floor_hot_rows, page),
        start_hot_blocks=ceil_div(config.start_hot_rows, page),
        max_hot_blocks=ceil_div(config.max_hot_rows, page),
    )


def state_bytes_per_region(config: HiSparseConfig, plan: LayerPlan, need: RequestBlocks) -> int:
    """Resolver state of one hot region over all index groups: position -> slot (int16), slot -> position and eviction
    key (int32), clock (int32), and with a policy that keeps state a position its frequency (int32)."""
    positions, slots = need.num_pages * plan.page_tokens, need.max_hot_blocks * plan.page_tokens
    per_position = 2 + (4 if config.policy == "lrfu" else 0)
    return len(plan.index_groups) * (per_position * positions + 8 * slots + 4)


def table_bytes(plan: LayerPlan, need: RequestBlocks, max_requests: int) -> int:
    """Resident and host block tables of all requests and the hot blocks of all regions (int32)."""
    pages = (plan.num_parts + 1) * max_requests * need.num_pages
    return 4 * (pages + plan.num_parts * max_requests * need.max_hot_blocks)


@dataclass(frozen=True)
class Concurrency:
    """Requests of the maximum length that fit at a time, by resource."""

    device: Fraction
    host: Fraction
    max_requests: int

    @property
    def value(self) -> Fraction:
        return min(self.device, self.host, Fraction(self.max_requests))

    @property
    def limit(self) -> str:
        """The resource that limits first: "device", "host" or "max_num_seqs"."""
        return min(
            ((self.device, "device"), (self.host, "host"), (Fraction(self.max_requests), "max_num_seqs")),
            key=lambda pair: pair[0],
        )[1]


def admission_concurrency(
    need: RequestBlocks, num_device_blocks: int, num_host_blocks: int, max_requests: int
) -> Concurrency:
    """Requests that fit if all were being admitted at once. One block of each pool is its null block."""
    return Concurrency(
        Fraction(num_device_blocks - 1, need.admission_blocks),
        Fraction(num_host_blocks - 1, need.num_pages),
        max_requests,
    )


def steady_concurrency(
    need: RequestBlocks, num_device_blocks: int, num_host_blocks: int, max_requests: int, hot_blocks: int
) -> Concurrency:
    """Requests that fit when all but one decode from the host and one is being admitted."""
    usable = num_device_blocks - 1
    if usable < need.admission_blocks:
        device = Fraction(usable, need.admission_blocks)
    else:
        device = 1 + Fraction(usable - need.admission_blocks, need.steady_blocks(hot_blocks))
    return Concurrency(device, Fraction(num_host_blocks - 1, need.num_pages), max_requests)
