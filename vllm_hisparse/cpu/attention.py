"""Sparse MLA attention on the CPU, over a paged latent cache or through HiSparse's index group.

Both ways gather the selected rows first and then run the same arithmetic on them, so their outputs are
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder
from vllm.v1.kv_cache_interface import AttentionSpec

LAST = torch.iinfo(torch.int32).max
ROWS_AT_ONCE = 64  # bounds the temporaries; every row is computed on its own


def register() -> None:
    """Registers the backend as CUSTOM. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{CpuSparseMLABackend.__name__}")


class IndexGroup(Protocol):
    """What attention needs of HiSparse's index group. `layer` is the layer's index in the group."""

    def convert_logical_to_physical_topk(
        self,
        layer: int,
        topk: torch.Tensor,
        md: Any,
        *,
        block_stride_rows: int | None,
        return_valid_counts: bool,
    ) -> torch.Tensor:
        """Flat rows int32 [tokens, K] of `physical_kv_cache`, -1 for padding and rows that are not there."""

    def physical_kv_cache(self, layer: int) -> torch.Tensor:
        """Contiguous [blocks, block_size, width]."""

    def prefill_chunks(
        self, layer: int, topk: torch.Tensor, md: Any
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(first row, end row, staged rows int32 [end - first, K] or -1, staging [m, width]).

        A staging area is valid until the iterator advances.
        """


class CpuSparseMLABackend(AttentionBackend):
    """Sparse MLA for bf16, fp16 and fp32 latent rows."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[CpuSparseMLAImpl]:
        return CpuSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CpuSparseMLAMetadataBuilder]:
        return CpuSparseMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


@dataclass
class CpuSparseMLAMetadata(AttentionMetadata):
    """One step's batch. Every token attends through its selection, so all of them count as decode tokens."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [requests + 1]
    seq_lens: torch.Tensor  # int32 [requests]
    slot_mapping: torch.Tensor  # int64 [tokens]
    block_table: torch.Tensor  # int32 [requests, blocks]
    req_id_per_token: torch.Tensor  # int32 [tokens], a token's batch row
    block_size: int
    topk_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0


class CpuSparseMLAMetadataBuilder(AttentionMetadataBuilder[CpuSparseMLAMetadata]):
    """Builds `CpuSparseMLAMetadata` from vLLM's common metadata."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.topk_tokens: int = vllm_config.model_config.hf_text_config.index_topk

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CpuSparseMLAMetadata:
        """Metadata of one step. The tensors of the common metadata are kept, not copied."""
        common = common_attn_metadata
        num_tokens = common.num_actual_tokens
        query_lens = common.query_start_loc_cpu.diff().long()
        request = torch.repeat_interleave(torch.arange(len(query_lens), dtype=torch.int32), query_lens)
        return CpuSparseMLAMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=num_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            req_id_per_token=request[:num_tokens],
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=num_tokens,
        )


class CpuSparseMLAImpl(MLAAttentionImpl[CpuSparseMLAMetadata], SharedTopkIndicesBuffer):
    """One layer's attention. With HiSparse on, `index_group` and `index_group_index` say where it belongs."""

    is_sparse = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: object | None = None,
        index_group_builder: SparseMLAIndexGroupBuilder | None = None,
        **mla_args: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_args["kv_lora_rank"]
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        self.index_group: Any = None  # vLLM looks at its class
        self.index_group_index = 0
        vllm_config = get_current_vllm_config()
        if vllm_config.attention_config.hisparse_config is not None:
            builder = index_group_builder or SparseMLAIndexGroupBuilder(self._selection())
            self.index_group, self.index_group_index = builder.register_layer(
                indexer is not None, vllm_config, head_size=head_size, kv_cache_dtype=kv_cache_dtype
            )

    def record_logical_topk_ready(self) -> None:
        """Nothing to record: without streams the selection is ready on return of the indexer."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,  # [n, kv_lora_rank]
        k_pe: torch.Tensor,  # [n, 1, rope_dim]
        kv_cache: torch.Tensor,  # [blocks, block_size, width], any strides
        slot_mapping: torch.Tensor,  # [n], -1 skips
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Writes the new rows into the cache."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten().long()
        stored = slots >= 0
        row = torch.cat([kv_c_normed, k_pe.flatten(1)], -1)[: slots.shape[0]]
        slots = slots[stored]
        kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = row[stored].to(kv_cache.dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],  # [tokens, heads, width], or its two parts
        kv_c_and_k_pe_cache: torch.Tensor,  # [blocks, block_size, width]
        attn_metadata: CpuSparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attends every row to its selected rows: [tokens, heads, kv_lora_rank]."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        topk = in_position_order(self._selection()[: q.shape[0]])
        if self.index_group is None:
            kv, valid = gather_paged(kv_c_and_k_pe_cache, topk, attn_metadata)
        else:
            group = cast(IndexGroup, self.index_group)
            kv, valid = gather_hisparse(group, self.index_group_index, topk, attn_metadata)
        return attend(q, kv, valid, self.scale, self.kv_lora_rank), None

    def _selection(self) -> torch.Tensor:
        assert self.topk_indices_buffer is not None
        return self.topk_indices_buffer


def in_position_order(topk: torch.Tensor) -> torch.Tensor:
    """Each row's positions ascending, -1 last, so that sums depend on the set alone: int32 [tokens, K]."""
    ordered = topk.masked_fill(topk < 0, LAST).sort(-1).values
    return ordered.masked_fill(ordered == LAST, -1)


def gather_paged(
    cache: torch.Tensor, topk: torch.Tensor, md: CpuSparseMLAMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selected rows of a plain paged cache: [tokens, K, width] and which of them exist, bool [tokens, K]."""
    position = topk.clamp_min(0).long()
    table = md.block_table[md.req_id_per_token[: topk.shape[0]].long()]
    block = table.long().gather(1, position // md.block_size)
    return cache[block, position % md.block_size], topk >= 0


def gather_hisparse(
    group: IndexGroup, layer: int, topk: torch.Tensor, md: CpuSparseMLAMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selected rows through the index group, as `gather_paged`. A staged row stands before a physical one."""
    rows = group.convert_logical_to_physical_topk(
        layer, topk, md, block_stride_rows=None, return_valid_counts=False
    )
    valid = rows >= 0
    kv = _flat(group.physical_kv_cache(layer))[rows.clamp_min(0).long()]
    for first, end, staged_rows, staging in group.prefill_chunks(layer, topk, md):
        staged = staged_rows >= 0
        kv[first:end][staged] = staging[staged_rows[staged].long()]
        valid[first:end] |= staged
    return kv, valid


def attend(
    q: torch.Tensor, kv: torch.Tensor, valid: torch.Tensor, scale: float, value_width: int
) -> torch.Tensor:
    """Softmax attention of every query row over its own rows: [tokens, heads, value_width], dtype of `q`.

    In fp32. Products are added by reductions over a contiguous last dimension and not by matrix products,
    whose rounding depends on their shape: an output row depends on nothing but its inputs. A row without any
    valid one gives zeros.

    Args:
        q: [tokens, heads, width].
        kv: [tokens, K, width]; the first `value_width` columns are the values.
        valid: bool [tokens, K].
    """
    out = q.new_empty(*q.shape[:2], value_width)
    for first in range(0, q.shape[0], ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        seen = valid[part].unsqueeze(1)  # [n, 1, K]
        rows = kv[part].float().masked_fill(~valid[part].unsqueeze(-1), 0.0).unsqueeze(1)  # [n, 1, K, width]
        logits = (q[part].float().unsqueeze(2) * rows).sum(-1) * scale  # [n, heads, K]
        weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0.0)
        values = rows[..., :value_width].transpose(2, 3).contiguous()  # [n, 1, value_width, K]
        out[part] = (weights.unsqueeze(2) * values).sum(-1).to(q.dtype)
    return out


def _flat(cache: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, width] -> [rows, width], without a copy."""
    return cache.view(-1, cache.shape[-1])
