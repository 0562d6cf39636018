"""The served model as the scheduler's side sees it: bytes of a token, layers, who runs an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm_hisparse.planning.geometry import Shape

__all__ = ["GLM_5_2", "PAGE_TOKENS", "ServedModel"]

PAGE_TOKENS = 64  # rows of a page: the block size of vLLM's sparse MLA and indexer kernels


@dataclass(frozen=True)
class ServedModel:
    """A DSA model. Layers in one index group follow each other; the first of a group runs the indexer."""

    name: str
    num_layers: int
    num_leaders: int
    row_bytes: int  # KV of one token in one layer
    key_bytes: int  # indexer key of one token in one leader
    top_k: int

    @property
    def token_bytes(self) -> int:
        """KV of one token, all layers: what a page holds a token, and what one missed position reads."""
        return self.num_layers * self.row_bytes

    @property
    def token_key_bytes(self) -> int:
        """Indexer keys of one token, all leaders. They stay on the device."""
        return self.num_leaders * self.key_bytes

    @property
    def leads(self) -> tuple[bool, ...]:
        """Whether each layer runs the indexer: groups as even as they come."""
        starts = {index * self.num_layers // self.num_leaders for index in range(self.num_leaders)}
        return tuple(layer in starts for layer in range(self.num_layers))

    @property
    def group_layers(self) -> tuple[int, ...]:
        """Layers of each index group."""
        starts = [layer for layer, leads in enumerate(self.leads) if leads]
        return tuple(end - start for start, end in pairwise((*starts, self.num_layers)))

    @property
    def shape(self) -> Shape:
        """What planning asks for."""
        return Shape(self.num_layers, self.num_leaders, self.row_bytes, self.key_bytes, PAGE_TOKENS)

    def specs(self) -> Mapping[str, Any]:
        """vLLM's KV cache specs of the layers and indexers, by name, one page a block."""
        import torch
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

        def spec(row_bytes: int, role: Any, leads: bool) -> Any:
            roles = {} if role is None else {"cache_role": role}
            return MLAAttentionSpec(
                block_size=PAGE_TOKENS,
                num_kv_heads=1,
                head_size=row_bytes,
                dtype=torch.uint8,
                is_index_group_leader=leads,
                **roles,
            )

        rows = {f"layers.{i}.attn": spec(self.row_bytes, None, leads) for i, leads in enumerate(self.leads)}
        keys = {
            f"layers.{i}.indexer": spec(self.key_bytes, SparseCacheRole.INDEXER, False)
            for i, leads in enumerate(self.leads)
            if leads
        }
        return rows | keys


# 656 bytes: 512 fp8 values, 4 fp32 scales, 64 bf16 values (fp8_ds_mla). 132: 128 fp8 values and an fp32
# scale.
GLM_5_2 = ServedModel("GLM-5.2", num_layers=78, num_leaders=21, row_bytes=656, key_bytes=132, top_k=2048)
