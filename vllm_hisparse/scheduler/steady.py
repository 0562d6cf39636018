"""Decode steps in which nothing changes.

vLLM asks every KV group of every running request in every step, though a request needs a block, and has a
page to publish, once in a page's tokens. With a group for each part of a page that is most of a step's
scheduling. So we remember how far each request can go without either.
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request

from .records import Record

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["SteadySlots"]


class SteadySlots:
    """`KVCacheManager.allocate_slots` and `cache_blocks` with an early exit; every other call goes to vLLM's,
    in the course of an allocation (`allocations.py`).

    The early exit returns what vLLM would return, and skips only what would change nothing: no group
    allocates, none frees (there is no sliding window), none publishes.
    """

    def __init__(self, manager: KVCacheManager, coordinator: "HiSparseCoordinator") -> None:
        self._allocate = manager.allocate_slots
        self._publish = manager.cache_blocks
        self._nothing = manager.empty_kv_cache_blocks
        self._allocations = coordinator.allocations
        self._refusal = coordinator.refusal
        self._count = manager.coordinator.get_num_blocks_to_allocate
        manager.coordinator.get_num_blocks_to_allocate = self._watched_count
        self._is_growth = False  # what vLLM adds up is for a running request
        self._num_wanted = 0  # device blocks, when vLLM last added up what another one takes
        self._watermark = manager.watermark_blocks
        self._records = coordinator.records
        self._unit = manager.block_pool.hash_block_size
        self._num_reprefillable = manager.coordinator.num_reprefillable_tokens

    def allocate(
        self, request: Request, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """See `KVCacheManager.allocate_slots`. Running requests are those without further arguments."""
        if args or kwargs:
            is_newcomer = request.request_id not in self._records
            if is_newcomer and self._refusal.stands(request.request_id):
                return None
            num_kept = kwargs.get("reserved_blocks", 0) + self._watermark
            blocks = self._ask(
                num_kept, request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs
            )
            if is_newcomer and blocks is None:
                self._refusal.note(request.request_id, self._num_wanted)
            return blocks
        end = request.num_computed_tokens + num_new_tokens
        record = self._records.get(request.request_id)
        if (
            record is not None
            and end + num_lookahead_tokens <= record.num_slots
            and (end < record.next_publication or request.num_tokens < record.next_publication)
        ):
            return self._nothing
        self._is_growth = True
        blocks = self._ask(0, request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
        if blocks is not None and record is not None:
            self._note(record, min(end, request.num_tokens))
        return blocks

    def _watched_count(self, **kwargs: Any) -> int:
        """See `KVCacheCoordinator.get_num_blocks_to_allocate`, which asks group by group."""
        if self._is_growth:
            num_lacking = self._allocations.num_lacking(kwargs["request_id"], kwargs["num_tokens"])
            return self._count(**kwargs) if num_lacking is None else num_lacking
        self._num_wanted = self._count(**kwargs)
        return self._num_wanted

    def _ask(self, num_kept: int, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        self._allocations.begin(request.request_id, num_kept)
        try:
            return self._allocate(request, *args, **kwargs)
        finally:
            self._is_growth = False
            self._allocations.end()

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """See `KVCacheManager.cache_blocks`, which vLLM calls when a step's tokens are known."""
        record = self._records.get(request.request_id)
        if record is not None and num_computed_tokens < record.next_publication:
            return
        self._publish(request, num_computed_tokens)
        if record is not None and record.next_publication:  # 0: not allocated by a running request yet
            self._note_published(record, num_computed_tokens)

    def _note(self, record: Record, num_cached: int) -> None:
        """vLLM has allocated, and published what is full of the first `num_cached` tokens."""
        record.num_slots = self._allocations.num_slots(record.request_id)
        self._note_published(record, num_cached)

    def _note_published(self, record: Record, num_cached: int) -> None:
        units = max(num_cached - self._num_reprefillable, 0) // self._unit
        record.next_publication = (units + 1) * self._unit
