"""What vLLM takes from the device pool for one request: its questions, and the room for what it then takes.

`KVCacheManager.allocate_slots` adds up what each group's manager says the request needs, compares the sum
with the pool's free blocks less those reserved for others, and then has each manager take its own. Blocks
that can be reclaimed are taken off the sum, so each answer is a promise. It is kept because

- nothing happens between question and taking but the adoption of the prefix hit, which the question counts;
- room is made at once, at the first taking, for all that was asked about, by the plan that answered
  (`reclaim.py`);
- nothing is taken off outside `allocate_slots`. There vLLM adds up what requests in flight have to come, to
  keep it free while another connector loads for somebody else. Two answers cannot promise the same block.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from .admission import NO_HIT, Admission, Hit
from .records import Record

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["Allocations"]


class Allocations:
    """The allocation in progress. The source group's manager is asked first, then the resident groups'."""

    def __init__(self, coordinator: "HiSparseCoordinator", admission: Admission) -> None:
        self._coordinator = coordinator
        self._pool = coordinator.pool
        self._host_pool = coordinator.host_pool
        self._parts = coordinator.layout.num_parts
        self._admission = admission
        others = [(m, 1) for m in coordinator.on_device if m not in coordinator.resident]
        self._kinds = [(coordinator.resident[0], len(coordinator.resident)), *others]  # groups they stand for
        self._request_id = ""  # of the request in `allocate_slots`; empty outside
        self._num_kept = 0  # blocks that have to stay free beside what it takes
        self._num_tokens = 0  # that it is to have blocks for, when last asked
        self._hit = NO_HIT
        self._asked: tuple[Sequence[KVCacheBlock], Sequence[int]] | None = None  # what `_hit` is of
        self._num_landing = 0  # pages of an import that take no device blocks

    def begin(self, request_id: str, num_kept: int) -> None:
        """vLLM enters `allocate_slots` for a request, beside which `num_kept` blocks have to stay free."""
        self._request_id, self._num_kept, self._num_tokens = request_id, num_kept, 0
        self._asked = None

    def end(self) -> None:
        """vLLM leaves it."""
        self._request_id = ""
        self._asked = None

    # ---- questions; nothing changes

    def num_to_start(self, blocks: Sequence[KVCacheBlock], landing: Sequence[int]) -> int:
        """Device blocks that a request takes beside its pages: of the prefix hit `blocks`, those in the free
        queue, and a region if pages of it or of an import (`landing`) are on the host. More than there are
        if the host has no room.
        """
        if not self._request_id or self._asked != (blocks, landing):  # vLLM asks twice
            self._hit = self._admission.inspect(blocks, len(landing))
            self._asked = blocks, landing
        self._num_landing = len(landing)
        if self._num_landing > self._host_pool.get_num_free_blocks() - self._hit.num_free_host:
            return self._pool.num_gpu_blocks
        if not self._hit.num_host_only:
            return self._hit.num_evictable
        regions = self._coordinator.regions
        region = regions.num_blocks if regions.num_free_ids else self._pool.num_gpu_blocks
        return self._hit.num_evictable + region

    @property
    def hit(self) -> Hit:
        """The prefix hit that `num_to_start` was asked about last, with pages whose keys are external."""
        return self._hit

    def num_to_grow(self, request_id: str, num_tokens: int, num_pages: int, is_admission: bool) -> int:
        """Device blocks for `num_pages` pages that the request lacks, less what can be reclaimed for it.

        `is_admission`: the pages are all that it lacks, of which it has to find room for some.
        """
        num_pages -= self._num_landing
        if is_admission:
            num_pages = self.cap(request_id, num_pages)
        need = num_pages * self._parts
        if request_id != self._request_id:
            return need
        self._num_tokens = num_tokens
        return need - self.num_reclaimable(request_id, num_tokens)

    def num_lacking(self, request_id: str, num_tokens: int) -> int | None:
        """What the groups' answers add up to for a running request, if there is so much room that nothing
        would be reclaimed for it; else None.
        """
        num_missing = self._num_missing(request_id, num_tokens)
        num_free = self._pool.get_num_free_blocks() - self._coordinator.regions.num_blocks
        return num_missing if num_missing <= num_free else None

    def cap(self, request_id: str, num_pages: int) -> int:
        """Pages that a request must find room for to be admitted: not all, if the host can take the rest.

        One that holds blocks already gives none back by waiting, so it is asked for no more than it needs at
        a time: it runs until it ends or, where the host has no room, is preempted and gives them back.
        """
        record = self._coordinator.records.get(request_id)
        if record is not None:
            return min(num_pages, self._admission.claim(record.has_backed))
        return self._admission.cap(num_pages, self._hit.has_backed, self._host_pool.get_num_free_blocks())

    def num_reclaimable(self, request_id: str, num_tokens: int) -> int:
        """Device blocks that could be freed at once, as far as the request needs them."""
        upper_bound = self._num_missing(request_id, num_tokens) + self._hit.num_blocks
        upper_bound -= self._num_landing * self._parts
        if upper_bound <= 0:
            return 0
        kept = self._num_kept + self._coordinator.regions.num_blocks
        missing = upper_bound + kept - self._pool.get_num_free_blocks()
        newcomer = self._newcomer(self._coordinator.records.get(request_id))
        return self._coordinator.reclaimer.num_reclaimable(missing, self._hit, newcomer)

    def num_at_a_time(self, num_tokens: int) -> int:
        """Device blocks that a request without a prefix holds at any one time: all its keys, and as many
        pages as it has to find room for.
        """
        (_, num_parts), *others = self._kinds
        num_pages = -(-num_tokens // self._coordinator.layout.page_tokens)
        num_keys = sum(-(-num_tokens // manager.block_size) * n for manager, n in others)
        return num_keys + min(num_pages, self._admission.claim(False)) * num_parts

    def num_slots(self, request_id: str) -> int:
        """Tokens that the request's blocks hold in every group."""
        return min(len(manager.req_to_blocks[request_id]) * manager.block_size for manager, _ in self._kinds)

    # ---- taking

    def make_room(self, record: Record, num_tokens: int, num_landing: int = 0) -> None:
        """Free what the groups are about to allocate, all pages but those that land on the host, and lease
        the region of a request that starts on host-only pages.
        """
        if record.request_id == self._request_id:
            num_tokens = max(num_tokens, self._num_tokens)
        num_free = self._num_missing(record.request_id, num_tokens) - num_landing * self._parts
        wants_region = record.region is None and record.needs_region
        if wants_region:
            num_free += self._coordinator.regions.num_blocks
        self._coordinator.reclaimer.reclaim(num_free, self._newcomer(record))
        if wants_region:
            self._coordinator.grant_region(record)

    @staticmethod
    def _newcomer(record: Record | None) -> Record | None:
        """The record of a request that does not run yet."""
        return record if record is not None and record.slot < 0 else None

    def _num_missing(self, request_id: str, num_tokens: int) -> int:
        """Blocks that all groups together still have to allocate; the parts' rows are equally long."""
        need = 0
        for manager, num_groups in self._kinds:
            have = len(manager.req_to_blocks.get(request_id, ()))
            need += max(-(-num_tokens // manager.block_size) - have, 0) * num_groups
        return need
