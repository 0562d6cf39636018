"""What was planned, as lines for the start-up log."""

from __future__ import annotations

from typing import Any

from vllm_hisparse.config import GIB, MIB, MULTI_CONNECTOR, HiSparseConfig

from .bounds import Concurrency, admission_concurrency, request_blocks, steady_concurrency
from .geometry import request_padding
from .layout import Layout

ADVICE = {
    "device": "raise gpu_memory_utilization or lower max_model_len",
    "host": "raise host_pool_gib",
    "regions": "lower max_model_len or max_hot_rows, which the resolver's state of a region grows with",
    "max_num_seqs": "raise max_num_seqs",
}


# Of admission: a request that is being admitted also holds the pages of its prompt's steps in flight.
ADMISSION_ADVICE = {**ADVICE, "device": "raise gpu_memory_utilization, or lower max_num_batched_tokens"}


def startup_lines(vllm_config: Any, layout: Layout) -> list[str]:
    """Pools, groups, padding, hot regions, both bounds with the resource that limits them, and a hint where
    indexer keys are most of what decoding needs.
    """
    config = HiSparseConfig.from_vllm_config(vllm_config)
    padding = request_padding(layout.geometry, layout.max_positions, layout.start_hot_blocks)
    return [
        _device_line(layout),
        _host_line(layout),
        str(padding),
        _regions_line(vllm_config, config, layout),
        *_concurrency_lines(vllm_config, layout),
        *_keys_lines(vllm_config, layout),
    ]


def steady_state(vllm_config: Any, layout: Layout, hot_blocks: int | None = None) -> Concurrency:
    """Most requests of max_model_len that decode at a time with regions of `hot_blocks`."""
    return steady_concurrency(
        request_blocks(vllm_config, layout),
        layout.num_device_blocks,
        layout.num_host_blocks,
        layout.num_regions,
        layout.max_requests,
        layout.start_hot_blocks if hot_blocks is None else hot_blocks,
    )


def _device_line(layout: Layout) -> str:
    parts = sorted({len(names) for names in layout.parts}, reverse=True)
    return (
        f"device pool: {layout.num_device_blocks} blocks of {layout.block_stride_bytes} bytes, "
        f"{layout.device_pool_bytes / GIB:.2f} GiB; an indexer block holds {layout.indexer_pages} x "
        f"{layout.page_tokens} tokens of {len(layout.indexer_layers)} layers, a resident or hot block "
        f"{layout.page_tokens} rows of {' or '.join(map(str, parts))} of {len(layout.layers)} layers "
        f"({layout.num_parts} parts)"
    )


def _host_line(layout: Layout) -> str:
    return (
        f"host pool: {layout.num_host_blocks} blocks of {layout.host_block_bytes} bytes, "
        f"{layout.host_pool_bytes / GIB:.2f} GiB; {len(layout.index_groups)} index groups"
    )


def _regions_line(vllm_config: Any, config: HiSparseConfig, layout: Layout) -> str:
    state = request_blocks(vllm_config, layout).state_bytes
    floor, start, cap = (
        blocks * layout.page_tokens
        for blocks in (layout.floor_hot_blocks, layout.start_hot_blocks, layout.max_hot_blocks)
    )
    return (
        f"{layout.num_regions} hot regions of {floor} to {cap} rows, {start} when granted; "
        f"{config.verify_rows} x top-k {config.top_k} a step, policy {config.policy}, "
        f"resolver state {state / MIB:.1f} MiB each, {layout.num_regions * state / MIB:.1f} MiB together"
    )


def _concurrency_lines(vllm_config: Any, layout: Layout) -> list[str]:
    need = request_blocks(vllm_config, layout)
    pools = layout.num_device_blocks, layout.num_host_blocks
    admission = admission_concurrency(need, *pools, layout.max_requests)
    steady = steady_state(vllm_config, layout)
    floor = steady_state(vllm_config, layout, layout.floor_hot_blocks)
    return [
        f"concurrency at {layout.max_positions} tokens: {float(admission.value):.2f} admitted at once "
        f"({need.admission_blocks} device blocks each), {float(steady.value):.2f} decoding "
        f"({need.steady_blocks(layout.start_hot_blocks)} each), {float(floor.value):.2f} with hot regions of "
        f"{layout.floor_hot_blocks * layout.page_tokens} rows",
        f"decoding is limited by {steady.limit}: {ADVICE[steady.limit]} (device {float(steady.device):.2f}, "
        f"host {float(steady.host):.2f}, regions {steady.num_regions}, max_num_seqs {steady.max_requests})",
        f"admission is limited by {admission.limit}: {ADMISSION_ADVICE[admission.limit]} "
        f"(device {float(admission.device):.2f}, host {float(admission.host):.2f}, "
        f"max_num_seqs {admission.max_requests})",
    ]


def _keys_lines(vllm_config: Any, layout: Layout) -> list[str]:
    need = request_blocks(vllm_config, layout)
    steady_blocks = need.steady_blocks(layout.start_hot_blocks)
    if 2 * need.indexer_blocks <= steady_blocks:
        return []
    if vllm_config.kv_transfer_config.kv_connector == MULTI_CONNECTOR:
        return []  # whoever is beside us may have them
    return [
        f"indexer keys take {need.indexer_blocks} of the {steady_blocks} device blocks that decoding needs, "
        "and no prefix is found without them: an OffloadingConnector beside HiSparseConnector keeps those of "
        "waiting prompts in host memory"
    ]
