"""Every private vLLM symbol that the plugin rebinds or relies on: what, why, which versions, when the entry
can go.

`docs/compatibility.md` is generated from this table, `vllm-hisparse doctor` and `install` check it.
"""

from dataclasses import dataclass

__all__ = ["LEDGER", "MIN_VERSION", "NEXT_UNSUPPORTED_VERSION", "Seam"]

MIN_VERSION = (0, 32)
NEXT_UNSUPPORTED_VERSION = (0, 34)


@dataclass(frozen=True)
class Seam:
    """One rebinding. `modules` maps a vLLM minor version to the module whose attribute is replaced."""

    symbol: str  # in the module, or "Class.method"
    modules: dict[tuple[int, int], str]
    parameters: tuple[str, ...]  # names of the parameters, ours and vLLM's alike
    replacement: str  # "module:attribute" inside this package
    why: str
    drop_when: str


_PLANNING = {(0, 32): "vllm.v1.core.kv_cache_utils", (0, 33): "vllm.v1.core.kv_cache_planning"}
_ATTN_UTILS = dict.fromkeys([(0, 32), (0, 33)], "vllm.v1.worker.gpu.attn_utils")
_SPARSE_MLA = dict.fromkeys([(0, 32), (0, 33)], "vllm.model_executor.layers.attention.sparse_mla_attention")
_FLASHMLA = dict.fromkeys([(0, 32), (0, 33)], "vllm.v1.attention.backends.mla.flashmla_sparse")
_OFFLOADING = dict.fromkeys(
    [(0, 32), (0, 33)], "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
)
_WORKER_UTILS = dict.fromkeys([(0, 32), (0, 33)], "vllm.v1.worker.utils")
_WORKER = dict.fromkeys([(0, 32), (0, 33)], "vllm.v1.worker.gpu_worker")
_INDEX_GROUP = dict.fromkeys([(0, 32), (0, 33)], "vllm.v1.attention.backends.mla.index_group")

LEDGER = (
    Seam(
        symbol="get_hisparse_kv_cache_groups",
        modules=_PLANNING,
        parameters=("vllm_config", "kv_cache_spec"),
        replacement="planning.groups:kv_cache_groups",
        why="our groups: source on the host, indexer, one resident group a part, no hot groups",
        drop_when="vLLM asks the connector or the platform for KV cache groups",
    ),
    Seam(
        symbol="get_hisparse_kv_cache_config",
        modules=_PLANNING,
        parameters=("vllm_config", "kv_cache_groups", "available_memory", "host_budget"),
        replacement="planning.pools:kv_cache_config",
        why="sizes of the device and host pools, group-major host rows",
        drop_when="vLLM asks the connector or the platform for the KVCacheConfig",
    ),
    Seam(
        symbol="get_hisparse_host_pool_bytes",
        modules=_PLANNING,
        parameters=("vllm_config",),
        replacement="planning.pools:host_pool_bytes",
        why="vLLM's does not look into a nested MultiConnector",
        drop_when="vLLM looks there",
    ),
    Seam(
        symbol="resolve_hisparse_specs",
        modules=_ATTN_UTILS,
        parameters=("vllm_config", "kv_cache_spec", "attn_layers"),
        replacement="planning.groups:resolve_specs",
        why="one spec for every pseudo layer of the resident groups",
        drop_when="the planner accepts layers that have no attention module",
    ),
    Seam(
        symbol="Worker.load_model",
        modules=_WORKER,
        parameters=("self", "load_dummy_weights"),
        replacement="runtime.loading:load_model",
        why="the host pool is taken while weights load; with HiSparse off it adds nothing",
        drop_when="a connector is told before the model is loaded",
    ),
    Seam(
        symbol="init_hisparse_kv_cache",
        modules=_ATTN_UTILS,
        parameters=(
            "kv_cache_config",
            "device",
            "kernel_block_sizes",
            "vllm_config",
            "forward_context",
            "block_tables",
        ),
        replacement="runtime.binding:init_kv_cache",
        why="allocates both pools and binds the index groups' layers to them",
        drop_when="a connector can allocate KV caches",
    ),
    Seam(
        symbol="AttentionGroup._with_kernel_block_table",
        modules=_WORKER_UTILS,
        parameters=("self", "common_attn_metadata", "ubatch_idx"),
        replacement="runtime.kernel_blocks:with_kernel_block_table",
        why="maps indexer blocks of several pages in every step, in less of the host's time than vLLM's",
        drop_when="vLLM keeps the views it writes to, or maps only what has changed",
    ),
    Seam(
        symbol="build_hisparse_prefill_staging_plan",
        modules=_SPARSE_MLA,
        parameters=("block_table", "seq_lens", "block_size", "staging_block_capacity"),
        replacement="runtime.prefill:staging_plan",
        why="vLLM's plan is made from the source group's block table, which stays empty with us",
        drop_when="the index group makes the plan",
    ),
    Seam(
        symbol="HiSparseMLAIndexGroup",
        modules=_INDEX_GROUP,
        parameters=(
            "logical_topk_indices",
            "physical_topk_indices",
            "valid_topk_counts",
            "side_stream",
            "logical_topk_ready",
            "physical_topk_ready",
            "has_indexer",
            "num_layers",
            "caches",
            "hisparse_group",
            "prefill_stream",
            "prefill_ready_events",
        ),
        replacement="runtime.index_group:HiSparseIndexGroup",
        why="selections are resolved by our resolver; a subclass, so that vLLM's isinstance checks hold",
        drop_when="the index group class is looked up in a registry",
    ),
    Seam(
        symbol="FlashMLASparseImpl._forward_bf16_kv",
        modules=_FLASHMLA,
        parameters=(
            "self",
            "q",
            "kv_c_and_k_pe_cache",
            "topk_indices",
            "attn_metadata",
            "actual_num_heads",
        ),
        replacement="runtime.bf16:forward_bf16",
        why="vLLM's stages all prefills of a batch, in memory of whatever size their contexts need",
        drop_when="the backend takes prefills in pieces, as it does for fp8 rows",
    ),
    Seam(
        symbol="OffloadingConnector",
        modules=_OFFLOADING,
        parameters=("vllm_config", "role", "kv_cache_config"),
        replacement="compat.offloading:OffloadingConnector",
        why="a subclass: learns of blocks that other groups and hot regions have got while a store was still "
        "to read them, saves indexer blocks of several pages, and keeps what a load that vLLM has put off "
        "is to read; with HiSparse off it adds nothing",
        drop_when="vLLM's looks for such blocks in all groups and regions, asks specs for their bytes, and "
        "keeps what it has found until it is loaded",
    ),
)
