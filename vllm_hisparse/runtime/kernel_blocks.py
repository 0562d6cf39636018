"""Block tables in kernel blocks, of groups whose blocks hold several: indexer blocks of several pages."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup

__all__ = ["with_kernel_block_table"]

# (ubatch, requests, blocks) -> (the table they are a part of, int32 [requests, kernel blocks], the same as
# [requests, blocks, kernel blocks of a block])
_Views = dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def with_kernel_block_table(
    self: "AttentionGroup", common_attn_metadata: CommonAttentionMetadata, ubatch_idx: int = 0
) -> CommonAttentionMetadata:
    """The metadata, with its block table int32 [requests, blocks] mapped to kernel blocks if they differ.

    What vLLM's method returns, with less of the host's time in every step: the views that it writes to are
    kept, and the metadata is copied instead of made again field by field. The mapped table stays where it
    is, for CUDA graphs read it there.
    """
    if self.kernel_block_size is None:
        return common_attn_metadata
    block_table = common_attn_metadata.block_table_tensor
    mapped, by_block = _views(self, ubatch_idx, *block_table.shape)
    torch.add(
        self.kernel_block_offsets,
        block_table.unsqueeze(-1),
        alpha=self.kernel_block_stride or by_block.shape[2],
        out=by_block,
    )
    copied = object.__new__(type(common_attn_metadata))
    copied.__dict__.update(common_attn_metadata.__dict__)
    copied.block_table_tensor = mapped
    return copied


def _views(
    group: "AttentionGroup", ubatch: int, num_requests: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What of the group's table takes the kernel blocks of `num_blocks` each: flat, and block by block."""
    kept: _Views = group.__dict__.setdefault("_hisparse_views", {})
    key = (ubatch, num_requests, num_blocks)
    if key not in kept or kept[key][0] is not group.kernel_block_table:  # vLLM may make the table anew
        assert group.kernel_block_table is not None
        per_block = group.kv_cache_spec.block_size // group.kernel_block_size
        mapped = group.kernel_block_table[ubatch, :num_requests, : num_blocks * per_block]
        kept[key] = group.kernel_block_table, mapped, mapped.unflatten(1, (num_blocks, per_block))
    return kept[key][1:]
