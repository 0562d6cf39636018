"""How many blocks the device pool and the host pool hold, and what lies beside the device pool.

Pure integers. An engine's pools (pools.py) and `vllm-hisparse plan` (estimate.py) are sized by the same
functions. More memory never makes a pool smaller.
"""

from __future__ import annotations

from typing import Any

from vllm_hisparse.config import GIB, HiSparseConfig, user_error

from .bounds import MIN_STATE_BYTES, STATE_SHARE, RequestBlocks, request_blocks, result_bytes, table_bytes
from .geometry import ceil_div
from .layout import LayerPlan

NUM_RESERVED_HOST_BLOCKS = 2  # the pool's null block, and one block for a copy in flight
MAX_HOST_ROWS = 1 << 31  # host rows are int32


def device_overhead_bytes(vllm_config: Any, plan: LayerPlan, num_regions: int) -> int:
    """Device memory beside the pool: region state, tables, a resolver's results, prefill staging, slack."""
    need = request_blocks(vllm_config, plan)
    config = HiSparseConfig.from_vllm_config(vllm_config)
    scheduler = vllm_config.scheduler_config
    max_requests = int(scheduler.max_num_seqs)
    results = result_bytes(
        plan,
        config.top_k,
        int(scheduler.max_num_batched_tokens),
        max_requests,
        min(config.floor_hot_rows, need.max_hot_blocks * plan.page_tokens),
    )
    staging = staging_pages(config, plan.page_bytes, need.max_pages) * plan.page_bytes
    tables = table_bytes(need, num_regions, max_requests)
    return num_regions * need.state_bytes + tables + results + staging + plan.page_bytes


def staging_pages(config: HiSparseConfig, page_bytes: int, max_pages: int) -> int:
    """Pages of the prefill staging area. It serves one layer of one request at a time."""
    return min(config.prefill_staging_bytes // page_bytes, max_pages)


def state_reserve_bytes(
    need: RequestBlocks, pool_bytes: int, block_stride_bytes: int, max_requests: int
) -> int:
    """Most bytes that the state of a pool's hot regions can take.

    `RequestBlocks.num_regions` without rounding to whole regions: a region more would otherwise take blocks
    from a pool that has grown by less.
    """
    blocks_of_a_region = need.num_parts * (need.floor_hot_blocks + need.tail_pages)
    fit = ceil_div(pool_bytes * need.state_bytes, blocks_of_a_region * block_stride_bytes)
    budget = max(MIN_STATE_BYTES, pool_bytes // STATE_SHARE)
    return max(need.state_bytes, min(max_requests * need.state_bytes, fit, budget))


def device_blocks(vllm_config: Any, plan: LayerPlan, available_memory: int) -> int:
    """Blocks of the pool in `available_memory` bytes, less what lies beside it."""
    need = request_blocks(vllm_config, plan)
    max_requests = int(vllm_config.scheduler_config.max_num_seqs)
    stateless = device_overhead_bytes(vllm_config, plan, 0)
    hot_tables = table_bytes(need, max_requests, 0)
    state = state_reserve_bytes(need, available_memory, plan.block_stride_bytes, max_requests)
    return max(0, available_memory - stateless - hot_tables - state) // plan.block_stride_bytes


def host_block_bytes(plan: LayerPlan) -> int:
    """One page of all layers."""
    return len(plan.layers) * plan.page_bytes


def host_blocks(plan: LayerPlan, host_budget: int) -> int:
    """Blocks of a host pool of `host_budget` bytes."""
    return min(host_budget // host_block_bytes(plan), (MAX_HOST_ROWS - 1) // plan.page_tokens)


def needed_host_blocks(need: RequestBlocks) -> int:
    """Fewest blocks of a host pool that can serve a request."""
    return need.num_pages + NUM_RESERVED_HOST_BLOCKS


def checked_host_blocks(plan: LayerPlan, need: RequestBlocks, host_budget: int) -> int:
    """`host_blocks`. Raises ValueError if a request does not fit in them."""
    num_blocks, block_bytes = host_blocks(plan, host_budget), host_block_bytes(plan)
    needed = needed_host_blocks(need)
    if num_blocks < needed:
        raise user_error(
            got=f"host_pool_gib={host_budget / GIB:g}: {num_blocks} host blocks of {block_bytes} bytes",
            need=f"{needed} blocks, {needed * block_bytes / GIB:.3f} GiB,",
            because="a request of max_model_len has all its pages there; lower max_model_len otherwise",
        )
    return num_blocks
