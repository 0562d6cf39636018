"""vLLM's OffloadingConnector beside HiSparse, where it keeps indexer keys.

It assumes two things that do not hold with HiSparse: that nobody but its own group takes blocks from the
pool, and that a layer's part of a block is contiguous.
"""

from collections.abc import Callable

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_hisparse.config import user_error
from vllm_hisparse.runtime.binding import current_runtime
from vllm_hisparse.scheduler.managers import join

__all__ = ["OffloadingConnector"]


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """vLLM's, and nothing but vLLM's while HiSparse is off."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._has_hisparse = vllm_config.attention_config.hisparse_config is not None
        self._handed_out: _HandedOut | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """vLLM's. Asked before KV memory is allocated, and so the place to refuse a configuration."""
        if (
            vllm_config.attention_config.hisparse_config is not None
            and not vllm_config.cache_config.enable_prefix_caching
        ):
            raise user_error(
                got="OffloadingConnector with --no-enable-prefix-caching",
                need="prefix caching",
                because="keys are of use only with the pages of their prefix, which are found by it",
            )
        return super().get_required_kvcache_layout(vllm_config)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Scheduler role: watch the device pool."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._has_hisparse:
            join(kv_cache_manager)
            self._handed_out = _HandedOut(kv_cache_manager.block_pool)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's jobs.

        A block may be in another group or in a hot region already while a store of the request that had it is
        still to read it. vLLM's scheduler has the worker finish such stores first, but only looks for blocks
        that its own group has got. HiSparse, the first connector, has taken what it needs by now.
        """
        if self._handed_out is not None:
            self.scheduler._current_batch_allocated_block_ids |= self._handed_out.take()
        return super().build_connector_meta(scheduler_output)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Worker role: a layer's share of each indexer block, see `Geometry.indexer_share_bytes`."""
        if self._has_hisparse:
            memory = current_runtime().memory
            shares = {name: memory.indexer_shares(i) for i, name in enumerate(memory.layout.indexer_layers)}
            kv_caches = kv_caches | shares
        super().register_kv_caches(kv_caches)


class _HandedOut:
    """Ids of the blocks that a pool has handed out, to whomever, since somebody last asked."""

    def __init__(self, pool: BlockPool) -> None:
        self._get: Callable[[int], list[KVCacheBlock]] = pool.get_new_blocks
        self._block_ids: set[int] = set()
        pool.get_new_blocks = self._get_new_blocks

    def _get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = self._get(num_blocks)
        self._block_ids.update([block.block_id for block in blocks])
        return blocks

    def take(self) -> set[int]:
        """The ids, once."""
        taken, self._block_ids = self._block_ids, set()
        return taken
