"""vLLM's OffloadingConnector beside HiSparse, where it keeps indexer keys.

It assumes three things that do not hold with HiSparse: that nobody but its own group takes blocks from the
pool, that a layer's part of a block is contiguous, and that a load starts in the step that finds it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import Request

from vllm_hisparse.config import user_error
from vllm_hisparse.runtime.binding import current_runtime
from vllm_hisparse.scheduler.coordinator import HiSparseCoordinator
from vllm_hisparse.scheduler.managers import join

__all__ = ["OffloadingConnector"]


class OffloadingConnector(offloading_connector.OffloadingConnector):
    """vLLM's, and nothing but vLLM's while HiSparse is off."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._has_hisparse = vllm_config.attention_config.hisparse_config is not None
        self._coordinator: HiSparseCoordinator | None = None
        self._handed_out: _HandedOut | None = None
        self._postponed: _PostponedLoads | None = None

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
            self._coordinator = join(kv_cache_manager)
            self._handed_out = _HandedOut(kv_cache_manager.block_pool)
            self._postponed = _PostponedLoads(self.scheduler, kv_cache_manager)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """vLLM's, if the request can be admitted at all."""
        if self._coordinator is not None and self._coordinator.refusal.stands(request.request_id):
            return 0, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._postponed is not None and matched[0]:
            self._postponed.note_match(request.request_id, num_computed_tokens, matched[0])
        return matched

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM's: the load starts."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._postponed is not None:
            self._postponed.end(request.request_id)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's."""
        if self._postponed is not None:
            self._postponed.end(request.request_id)
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return finished

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished`."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """vLLM's, which takes no notice of who reads."""
        if self._postponed is not None:
            self._postponed.forget()
        done: bool | None = super().reset_cache()
        return done

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's jobs.

        A block may be in another group or in a hot region already while a store of the request that had it is
        still to read it. vLLM's scheduler has the worker finish such stores first, but only looks for blocks
        that its own group has got. HiSparse, the first connector, has taken what it needs by now.
        """
        if self._postponed is not None:
            self._postponed.keep()
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


class _PostponedLoads:
    """Loads that vLLM starts only when the steps in flight have ended, from 0.33 on and with HiSparse alone.

    In the meantime a store may evict what was found for them, and vLLM fails when the load starts. So the
    chunks are held like those of a load that has begun.
    """

    def __init__(self, scheduler: Any, manager: KVCacheManager) -> None:
        self._scheduler = scheduler  # an OffloadingConnectorScheduler
        self._manager = manager
        self._matched: dict[str, range] = {}  # in this step: request -> the tokens that can be loaded
        self._held: dict[str, tuple[list[Any], Any]] = {}  # request -> (keys of chunks, its context)

    def note_match(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> None:
        """So many tokens behind the computed ones can be loaded for the request, if it is admitted."""
        self._matched[request_id] = range(num_computed_tokens, num_computed_tokens + num_tokens)

    def keep(self) -> None:
        """The step's allocations are done: requests that have got blocks wait for their load."""
        for request_id, tokens in self._matched.items():
            if any(self._manager.get_blocks(request_id).blocks):
                self._hold(request_id, tokens)
        self._matched.clear()

    def _hold(self, request_id: str, tokens: range) -> None:
        manager = self._scheduler.manager  # locked by the step
        status = self._scheduler._req_status[request_id]
        keys: list[Any] = []
        for group, state in zip(self._scheduler.config.kv_group_configs, status.group_states, strict=True):
            chunk_tokens = group.tokens_per_chunk
            keys += state.offload_keys[tokens.start // chunk_tokens : -(-tokens.stop // chunk_tokens)]
        keys = [key for key in keys if manager.lookup(key, status.req_context) is LookupResult.HIT]
        manager.prepare_load(keys, status.req_context)
        self._held[request_id] = keys, status.req_context

    def end(self, request_id: str) -> None:
        """The request's load has begun, or never will."""
        self._matched.pop(request_id, None)
        keys, context = self._held.pop(request_id, ((), None))
        if keys:
            is_locked = self._scheduler._step_region is not None
            with nullcontext() if is_locked else self._scheduler.manager.lock:
                self._scheduler.manager.complete_load(keys, context)

    def forget(self) -> None:
        """All chunks are dropped, whoever holds them."""
        self._matched.clear()
        self._held.clear()
