"""Engine configurations and layer specs as vLLM hands them to the planner, without an engine."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole

from vllm_hisparse.planning.geometry import Shape

PAGE_TOKENS = 64
ROW_BYTES = {"fp8": 656, "bf16": 1152}
KEY_BYTES = 132  # 128 e4m3 and one fp32 scale

# name -> one letter a layer: F runs the indexer, S reads the selection of the layer before
PATTERNS = {
    "glm-5.2": "".join("F" if i < 3 or i % 4 == 2 else "S" for i in range(78)),
    "deepseek-v3.2": "F" * 61,
    "glm-tiny": "F" * 8,
    "glm-shared": "FSSSFSSS",
}


def shape_of(pattern: str, row_bytes: int) -> Shape:
    return Shape(len(pattern), pattern.count("F"), row_bytes, KEY_BYTES, PAGE_TOKENS)


def source_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def indexer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def layer_specs(pattern: str, row_bytes: int = 656, block_size: int = PAGE_TOKENS) -> dict[str, KVCacheSpec]:
    """Specs of the layers' rows and keys, in the order in which a model registers them."""
    specs: dict[str, KVCacheSpec] = {}
    for layer, letter in enumerate(pattern):
        common = {"block_size": block_size, "num_kv_heads": 1, "dtype": torch.uint8}
        specs[source_name(layer)] = MLAAttentionSpec(
            **common, head_size=row_bytes, is_index_group_leader=letter == "F"
        )
        if letter == "F":
            specs[indexer_name(layer)] = MLAAttentionSpec(
                **common, head_size=KEY_BYTES, cache_role=SparseCacheRole.INDEXER
            )
    return specs


def connector(**options: Any) -> dict[str, Any]:
    """Configuration of HiSparseConnector as a child of MultiConnector."""
    return {
        "kv_connector": "HiSparseConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_pool_gib": 1.0} | options,
    }


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def engine(
    entry: dict[str, Any] | None = None,
    *,
    top_k: int | None = 2048,
    device_buffer_size: int | None = None,
    eager_host_mirror: bool = True,
    speculative_tokens: int | None = None,
    max_model_len: int = 65536,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 8192,
    steps_in_flight: int = 2,
    num_gpu_blocks_override: int | None = None,
    **options: Any,
) -> Any:
    """What the planner reads of a VllmConfig. `options` are the connector's, unless `entry` is all of it."""
    entry = connector(**options) if entry is None else entry
    hf_config = SimpleNamespace(model_type="glm_moe_dsa")
    if top_k is not None:
        hf_config.index_topk = top_k
    speculative = None
    if speculative_tokens is not None:
        speculative = SimpleNamespace(
            num_speculative_tokens=speculative_tokens, use_eagle_block_drop=lambda: False
        )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**entry),
        attention_config=SimpleNamespace(
            hisparse_config=SimpleNamespace(
                device_buffer_size=device_buffer_size, eager_host_mirror=eager_host_mirror
            )
        ),
        model_config=SimpleNamespace(
            hf_config=hf_config,
            max_model_len=max_model_len,
            original_max_model_len=max_model_len,
            supports_kv_cache_grouping=False,
        ),
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            scheduler_reserve_full_isl=True,
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            world_size=1,
            rank=0,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE")),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=num_gpu_blocks_override,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: kv_layout("BLHNC"),
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        max_in_flight_tokens=steps_in_flight * max_num_batched_tokens,
        num_prefill_lookahead_tokens=0,
    )


def kv_layout(name: str) -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout[name]
