"""vLLM configurations of a tiny DSA engine for tests of the scheduler side: no weights, no worker, no device.

Every object is vLLM's own. HiSparse is put into the finished VllmConfig, behind vLLM's check that the
platform is CUDA, so the same code serves a CPU build and a CUDA wheel on a machine without a GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vllm_hisparse.compat.install import check_version, install
from vllm_hisparse.compat.ledger import LEDGER
from vllm_hisparse.config import CONNECTOR, GIB, MIB, NIXL_CONNECTOR
from vllm_hisparse.planning.bounds import request_blocks
from vllm_hisparse.planning.geometry import Shape, make_geometry
from vllm_hisparse.planning.layout import LayerPlan
from vllm_hisparse.planning.specs import ResidentSpec, resident_name

from .harness import multi
from .models import TinyModel, config
from .offloading import offloading

__all__ = [
    "EngineOptions",
    "build_scheduler",
    "make_kv_cache_config",
    "make_plan",
    "make_vllm_config",
    "minimum_device_blocks",
    "planning_module",
]

ROW_BYTES = 64
KEY_BYTES = 16


@dataclass(frozen=True)
class EngineOptions:
    """An engine in the units of the scheduler: blocks, pages and tokens."""

    num_device_blocks: int = 40  # with the null block
    num_host_blocks: int = 120  # with the null block
    page_tokens: int = 4
    num_parts: int = 1
    indexer_pages: int = 1
    num_ranks: int = 1
    max_requests: int = 4
    max_step_tokens: int = 16
    max_model_len: int = 96
    top_k: int = 4
    hot_rows: int = 8  # of a region when it is granted
    max_hot_rows: int = 8  # that a region may grow to
    low: float = 0.2
    high: float = 0.5
    prefix_share: float = 0.0  # levels are of all free blocks
    max_passing: int = 16
    prefix_caching: bool = True
    async_scheduling: bool = False
    eager_host_mirror: bool = True
    always_host: bool = False
    kv_role: str = "kv_both"
    nixl_role: str | None = None  # of a HiSparseNixlConnector beside
    load_failure_policy: str = "recompute"
    num_drafts: int = 0
    drafts_by: str = "ngram"  # or "mtp", whose drafts need slots ahead
    policy: str = "fcfs"  # or "priority"
    num_offload_chunks: int = 0  # indexer blocks that an OffloadingConnector keeps; 0: there is none
    offload_prompt_only: bool = True
    kv_events: str | None = None  # directory in which events are published and replayed, as ZMQ sockets

    @property
    def num_hot_blocks(self) -> int:
        """Device blocks of a region, all parts together."""
        return self.num_parts * -(-self.hot_rows // self.page_tokens)


def make_vllm_config(options: EngineOptions, directory: Path) -> Any:
    """The engine's VllmConfig; `directory` receives the model's config.json."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.config.attention import HiSparseConfig

    install()
    longest = max(options.max_model_len, TinyModel.max_position_embeddings)
    model = TinyModel(index_pattern="FSF", index_topk=options.top_k, max_position_embeddings=longest)
    (directory / "config.json").write_text(json.dumps(config(model)))
    scheduler = SchedulerConfig(
        max_num_batched_tokens=options.max_step_tokens,
        max_num_seqs=options.max_requests,
        max_model_len=options.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=options.async_scheduling,
        policy=options.policy,
    )
    engine = VllmConfig(
        model_config=ModelConfig(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=options.max_model_len,
        ),
        scheduler_config=scheduler,
        cache_config=CacheConfig(block_size=64, enable_prefix_caching=options.prefix_caching),
        parallel_config=ParallelConfig(tensor_parallel_size=options.num_ranks),
        device_config=DeviceConfig(device="cpu"),
    )
    if options.num_drafts:
        engine.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=options.num_drafts,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
        )
        engine.speculative_config.method = options.drafts_by
    # Platforms have opinions on these.
    engine.scheduler_config.disable_hybrid_kv_cache_manager = False
    engine.scheduler_config.async_scheduling = options.async_scheduling
    engine.cache_config.enable_prefix_caching = options.prefix_caching
    engine.cache_config.block_size = options.page_tokens
    engine.cache_config.kv_cache_layout = "BLHNC"
    engine.attention_config.hisparse_config = HiSparseConfig(
        device_buffer_size=options.hot_rows, eager_host_mirror=options.eager_host_mirror
    )
    if options.kv_events is not None:
        engine.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{options.kv_events}/events",
            replay_endpoint=f"ipc://{options.kv_events}/replay",
        )
    engine.kv_transfer_config = KVTransferConfig(
        **_connectors(options), kv_load_failure_policy=options.load_failure_policy
    )
    return engine


def _connectors(options: EngineOptions) -> dict[str, Any]:
    hisparse = {
        "kv_connector": CONNECTOR,
        "kv_role": options.kv_role,
        "kv_connector_extra_config": {
            "host_pool_gib": (options.num_host_blocks + 0.5) * _host_block_bytes(options) / GIB,
            "low_watermark": options.low,
            "high_watermark": options.high,
            "prefix_share": options.prefix_share,
            "max_passing": options.max_passing,
            "max_hot_rows": options.max_hot_rows,
            "always_host": options.always_host,
        },
    }
    if options.nixl_role is not None:
        nixl = {"kv_connector": NIXL_CONNECTOR, "kv_role": options.nixl_role}
        return multi(hisparse, nixl) | {"kv_role": options.nixl_role}
    if not options.num_offload_chunks:
        return hisparse
    chunk_bytes = make_plan(options).indexer_share_bytes * options.num_parts * options.num_ranks
    store = offloading(
        options.num_offload_chunks * chunk_bytes / MIB, offload_prompt_only=options.offload_prompt_only
    )
    return multi(hisparse, store) | {"kv_role": options.kv_role}


def make_plan(options: EngineOptions) -> LayerPlan:
    """As many layers as parts, each an index group of its own."""
    layers = tuple(f"layers.{i}.attn" for i in range(options.num_parts))
    indexers = tuple(f"layers.{i}.indexer" for i in range(options.num_parts))
    shape = Shape(
        num_layers=len(layers),
        num_indexer_layers=len(indexers),
        row_bytes=ROW_BYTES,
        indexer_row_bytes=KEY_BYTES,
        page_tokens=options.page_tokens,
    )
    return LayerPlan(
        geometry=make_geometry(shape, options.num_parts, options.indexer_pages),
        layers=layers,
        index_groups=tuple((name,) for name in layers),
        indexer_layers=indexers,
    )


def minimum_device_blocks(engine: Any, options: EngineOptions) -> int:
    """The smallest pool that planning accepts for a request of `max_model_len`, with the null block."""
    return request_blocks(engine, make_plan(options)).admission_blocks + 1


def make_kv_cache_config(engine: Any, options: EngineOptions) -> Any:
    """What vLLM's planning makes of the engine; `cache_config` is updated as the engine core does it."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    planning = planning_module()
    plan = make_plan(options)
    engine.cache_config.num_gpu_blocks_override = options.num_device_blocks
    memory = options.num_device_blocks * plan.block_stride_bytes
    specs = [_worker_specs(plan)] * options.num_ranks
    groups = getattr(planning, "get_global_kv_cache_groups", None)  # a step of its own since 0.33
    extra = () if groups is None else (groups(engine, specs),)
    configs = planning.get_kv_cache_configs(engine, specs, [memory] * options.num_ranks, *extra)
    result = generate_scheduler_kv_cache_config(configs)
    engine.cache_config.num_gpu_blocks = result.num_blocks
    assert result.num_blocks == options.num_device_blocks, result.num_blocks
    assert result.hisparse_host_num_blocks == options.num_host_blocks, result.hisparse_host_num_blocks
    return result


def build_scheduler(config: Any, kv_cache_config: Any) -> tuple[Any, Any]:
    """(scheduler, block hasher), made as the engine core makes them."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    return scheduler, get_request_block_hasher(hash_block_size, sha256)


def planning_module() -> Any:
    """The module that this vLLM plans KV caches in."""
    return import_module(LEDGER[0].modules[check_version()])


def _host_block_bytes(options: EngineOptions) -> int:
    return options.num_parts * options.page_tokens * ROW_BYTES


def _worker_specs(plan: LayerPlan) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    row = MLAAttentionSpec(
        block_size=plan.page_tokens,
        num_kv_heads=1,
        head_size=ROW_BYTES // 4,
        dtype=torch.float32,
        is_index_group_leader=True,
    )
    key = replace(
        row, head_size=KEY_BYTES // 4, cache_role=SparseCacheRole.INDEXER, is_index_group_leader=False
    )
    specs: dict[str, Any] = dict.fromkeys(plan.layers, row) | dict.fromkeys(plan.indexer_layers, key)
    for part, names in enumerate(plan.parts):
        spec = ResidentSpec(
            block_size=plan.page_tokens, plan=plan, part=part, block_stride_alignment=plan.block_stride_bytes
        )
        specs |= {resident_name(name): spec for name in names}
    return specs
