"""Checks of the engine around the plugin: which of vLLM's settings go with it.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from .config import (
    CONNECTOR,
    MULTI_CONNECTOR,
    NIXL_CONNECTOR,
    HiSparseConfig,
    NixlOptions,
    all_connectors,
    connector_entry,
    nixl_options,
    user_error,
)

__all__ = ["check_nixl", "validate_engine"]

MAX_REQUESTS = 6000  # csrc/fetch.cu

# They move a request's blocks of every KV group; the host group has one only of pages written there.
BLOCK_MOVERS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector")


def validate_engine(vllm_config: Any, cudagraph_mode: Any = None) -> HiSparseConfig:
    """Checks the whole engine configuration before anything is allocated, and returns the plugin's own.

    `cudagraph_mode`: as the user asked for it, where the platform has changed it since.
    Raises ValueError for the first setting that does not fit.
    """
    config = HiSparseConfig.from_vllm_config(vllm_config)
    if vllm_config.attention_config.hisparse_config is None:
        raise user_error(
            got=f"{CONNECTOR} without attention_config.hisparse_config",
            need="--attention-config '{\"hisparse_config\": {}}'",
            because=f"vLLM enables us by it, and does not infer it below a nested {MULTI_CONNECTOR}",
        )
    role = connector_entry(vllm_config).get("kv_role")
    if role not in ("kv_both", "kv_producer"):
        raise user_error(
            got=f"kv_role={role!r} for {CONNECTOR}",
            need="'kv_both'",
            because="it writes pages to the host and reads them back",
        )
    _check_connectors(all_connectors(vllm_config), vllm_config.device_config.device_type)
    mode = cudagraph_mode if cudagraph_mode is not None else vllm_config.compilation_config.cudagraph_mode
    _check_engine(vllm_config, getattr(mode, "name", mode))
    _check_trace(config, vllm_config, getattr(mode, "name", mode))
    return config


def check_nixl(entry: Mapping[str, Any], device_type: str) -> NixlOptions:
    """Checks the configuration of a HiSparseNixlConnector and returns its options. Raises ValueError."""
    options = nixl_options(entry.get("kv_connector_extra_config") or {})
    role = entry.get("kv_role")
    if role not in ("kv_producer", "kv_consumer"):
        raise user_error(
            got=f"kv_role={role!r} for {NIXL_CONNECTOR}",
            need="'kv_producer' or 'kv_consumer'",
            because="an engine either lends its pages or borrows others'",
        )
    buffers = entry.get("kv_buffer_device") or device_type
    if buffers != device_type:
        raise user_error(
            got=f"kv_buffer_device={buffers!r} for {NIXL_CONNECTOR}",
            need=repr(device_type),
            because="pages are read from and into the pools as they lie",
        )
    if find_spec("nixl") is None:
        raise user_error(
            got=f"{NIXL_CONNECTOR} and no package nixl",
            need="pip install nixl",
            because="it moves pages between engines",
        )
    return options


def _check_connectors(entries: Sequence[Mapping[str, Any]], device_type: str) -> None:
    names = [str(entry.get("kv_connector")) for entry in entries]
    movers = sorted(set(names).intersection(BLOCK_MOVERS))
    if movers:
        raise user_error(
            got=f"{movers[0]} beside {CONNECTOR}",
            need=NIXL_CONNECTOR,
            because="with HiSparse a request's blocks have holes, where pages are on the other tier",
        )
    for entry in entries:
        if entry.get("kv_connector") == NIXL_CONNECTOR:
            check_nixl(entry, device_type)


def _check_trace(config: HiSparseConfig, vllm_config: Any, cudagraph_mode: str | None) -> None:
    on_cuda = vllm_config.device_config.device_type == "cuda"
    if config.trace_path is not None and on_cuda and cudagraph_mode not in (None, "NONE"):
        raise user_error(
            got=f"trace_path with cudagraph_mode={cudagraph_mode}",
            need="--enforce-eager",
            because="a graph replays kernels, not the code that records selections",
        )


def _check_engine(vllm_config: Any, cudagraph_mode: str | None) -> None:
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    for size in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, size, 1) > 1:
            raise user_error(
                got=f"{size}={getattr(parallel, size)}",
                need="1",
                because="every rank holds every layer and every position",
            )
    if scheduler.max_num_seqs > MAX_REQUESTS:
        raise user_error(
            got=f"max_num_seqs={scheduler.max_num_seqs}",
            need=f"at most {MAX_REQUESTS}",
            because="the fetch kernel sums up a step's reads, request by request, in shared memory",
        )
    if cudagraph_mode == "FULL":
        raise user_error(
            got="cudagraph_mode=FULL",
            need="FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE or NONE",
            because="a prefill over host-backed context is staged outside of graphs",
        )
    if not scheduler.scheduler_reserve_full_isl:
        raise user_error(
            got="--no-scheduler-reserve-full-isl",
            need="prompts reserved as a whole",
            because="prompts admitted by chunks could wait for each other's host blocks for ever",
        )
    if scheduler.disable_hybrid_kv_cache_manager:
        raise user_error(
            got="--disable-hybrid-kv-cache-manager",
            need="the hybrid KV cache manager",
            because="indexer, resident and hot blocks share one pool as separate groups",
        )
