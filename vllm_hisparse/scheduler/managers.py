"""vLLM's per-group managers of the source and resident groups. They translate vLLM's calls; the coordinator
decides.

The source group comes first in vLLM's group list, so its manager opens every two-step call: it sees the
prefix hit before the resident managers do, and it makes room before any of them allocates. The indexer group
keeps vLLM's own manager.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.request import Request

from .host_pool import HostPool, OneBlock

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from .coordinator import HiSparseCoordinator

__all__ = ["ResidentManager", "SourceManager", "join"]


def join(manager: "KVCacheManager") -> "HiSparseCoordinator":
    """The coordinator that HiSparseConnector has bound to vLLM's `manager`, for a connector beside it."""
    managers = manager.coordinator.single_type_managers
    coordinator = next(m for m in managers if isinstance(m, SourceManager)).coordinator
    coordinator.has_company = True
    return coordinator


class SourceManager(FullAttentionManager):
    """The host tier: `req_to_blocks[request][page]` is the page's host block, or the null block while it has
    none.
    """

    coordinator: "HiSparseCoordinator"
    host_pool: HostPool
    retains_longer_hit = True  # pages beyond the indexer's keys count if another connector loads the keys

    def bind(self, coordinator: "HiSparseCoordinator", host_pool: HostPool) -> None:
        """Switch to the host pool.

        vLLM builds every manager with the device pool, before the connector is bound.
        """
        self.coordinator = coordinator
        self.block_pool = self.host_pool = host_pool
        self._null_block = host_pool.null_block

    @classmethod
    def find_longest_cache_hit(cls, **lookup: Any) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The lookup over both tiers, cut where the request could not be admitted."""
        (blocks,), num_tokens = super().find_longest_cache_hit(**lookup)
        num_pages = lookup["block_pool"].num_admissible(blocks)
        if num_pages < len(blocks):
            block_size, alignment = lookup["kv_cache_spec"].block_size, lookup["alignment_tokens"]
            num_tokens = num_pages * block_size // alignment * alignment
            blocks = blocks[: num_tokens // block_size]
        return (blocks,), num_tokens

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Device blocks only: hits that leave the free queue when touched, and the region of a hit or an
        import that needs one.
        """
        landing = (
            self.coordinator.imports.host_pages(request_id, len(new_computed_blocks), total_computed_tokens)
            if num_local_computed_tokens < total_computed_tokens
            else ()
        )
        return self.coordinator.allocations.num_to_start(new_computed_blocks, landing)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adopt a prefix hit for this group and all resident groups.

        It reaches as far into the external tokens as pages are there: an OffloadingConnector loads the keys
        that are missing for them, and no connector may write to them.
        """
        self.num_cached_block[request_id] = len(new_computed_blocks)
        if new_computed_blocks:  # there may be none, of a hit that reaches further in another group
            self.coordinator.adopt(request_id, new_computed_blocks)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Make room for tokens that a connector loads.

        Those of an import land where `landing.py` says; any others on the device, and a host block is taken
        when they are written back.
        """
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        if request_id in self.coordinator.imports:
            self.num_cached_block.setdefault(request_id, 0)
            self.coordinator.land(request_id, num_local_computed_tokens, num_tokens)
        else:
            self.coordinator.make_room(request_id, num_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Takes no host block, but makes room on the device for what the other groups are about to take."""
        self.num_cached_block.setdefault(request_id, 0)
        self.coordinator.make_room(request_id, num_tokens)
        return []

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """A host page is published when its copy completes, never here."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """No cascade attention over pages that may leave."""
        return 0

    def set_prefix(self, request_id: str, blocks: Sequence[KVCacheBlock | None]) -> None:
        """Host copies of a prefix hit's pages, already leased; None for a page that has none."""
        self.req_to_blocks[request_id].extend([block or self._null_block for block in blocks])

    def hold(self, request_id: str, page: int, block: KVCacheBlock) -> None:
        """The request now leases `block` as the host copy of `page`."""
        blocks = self.req_to_blocks[request_id]
        blocks.extend([self._null_block] * (page + 1 - len(blocks)))
        blocks[page] = block

    def unhold(self, request_id: str, page: int) -> None:
        """The request has no host copy of `page` any more."""
        self.req_to_blocks[request_id][page] = self._null_block

    def host_block(self, request_id: str, page: int) -> KVCacheBlock:
        """The host block of `page`, the null block if it has none."""
        blocks = self.req_to_blocks.get(request_id, ())
        return blocks[page] if 0 <= page < len(blocks) else self._null_block

    def publish(self, request: Request, page: int, block: KVCacheBlock) -> None:
        """Make a written host page findable by its hash."""
        if not self.enable_caching or block.block_hash is not None:
            return
        if (page + 1) * self.block_size <= len(request.block_hashes) * self.host_pool.hash_block_size:
            self.host_pool.publish(request, page, block, self.block_size)
            self.coordinator.num_published += 1

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Host leases of written pages. Those of copies in flight stay with their transfer."""
        keep = self.coordinator.drop(request_id)
        row = list(self.req_to_blocks.get(request_id, ()))
        super().pop_blocks_for_free(request_id)  # from 0.33 on without the row's leading null blocks
        return [b for page, b in enumerate(row) if page not in keep and not b.is_null]


class ResidentManager(SingleTypeKVCacheManager):
    """One part of the resident pages: `req_to_blocks[request][page]`, the null block where the device copy is
    gone.
    """

    coordinator: "HiSparseCoordinator"

    def bind(self, coordinator: "HiSparseCoordinator", part: int) -> None:
        """Join the coordinator as `part`."""
        self.coordinator = coordinator
        self.part = part
        self._is_last = part == len(coordinator.resident) - 1  # to publish a page

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Takes no part in the lookup: the source group answers for both tiers."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """No cascade attention over pages that may leave."""
        return 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks still to take in all parts, less what can be reclaimed for all groups; a pure query.

        Part 0 answers for all parts, whose rows are equally long.
        """
        if self.part:
            return 0
        if request_id in self.num_cached_block:
            have = len(self.req_to_blocks[request_id])
        else:
            have = self.coordinator.allocations.hit.num_pages
        num_pages = max(cdiv(num_tokens, self.block_size) - have, 0)
        return self.coordinator.allocations.num_to_grow(
            request_id, num_tokens, num_pages, apply_admission_cap
        )

    def add_local_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Done by the source group's manager."""

    def set_prefix(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """Pages of a prefix hit, already leased; the null block for host-only ones."""
        self.req_to_blocks[request_id].extend(blocks)
        self.num_cached_block[request_id] = len(blocks)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Blocks for tokens that an external connector loads, where they land on the device."""
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        if request_id not in self.coordinator.imports:
            self.allocate_new_blocks(request_id, num_tokens, 0)
            return
        self.num_cached_block.setdefault(request_id, 0)
        row = self.req_to_blocks[request_id]
        on_host = set(self.coordinator.imports[request_id].host_pages)
        pages = range(len(row), cdiv(num_tokens, self.block_size))
        taken = iter(self.block_pool.get_new_blocks(len(pages) - len(on_host)))
        row.extend(self._null_block if page in on_host else next(taken) for page in pages)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """The base class's allocation; the coordinator learns of new pages once, from part 0."""
        self.num_cached_block.setdefault(request_id, 0)
        if num_tokens <= len(self.req_to_blocks[request_id]) * self.block_size:
            return []
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        if self.part == 0:
            self.coordinator.grow(request_id, len(blocks))
        return blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Publish full device pages under this group's id, for `HostPool`'s lookup over both tiers.

        Pages that are still arriving are left to `publish`.
        """
        request_id = request.request_id
        cached = self.num_cached_block.get(request_id, 0)
        if num_tokens < (cached + 1) * self.block_size:
            return
        hashed = len(request.block_hashes) * self.block_pool.hash_block_size
        full = min(num_tokens, hashed) // self.block_size
        if cached < full:
            blocks = self.req_to_blocks[request_id]
            self.block_pool.cache_full_blocks(
                request,
                blocks,
                cached,
                full,
                self.block_size,
                self.kv_cache_group_id,
                self.coordinator.arrived(request_id, cached, full),
            )
            self.num_cached_block[request_id] = full
            if self._is_last:
                self.coordinator.host_pool.on_device.note_published(blocks[cached:full])
            if self.part == 0:
                self.coordinator.num_published += full - cached

    def has_passed(self, request_id: str, page: int) -> bool:
        """Whether `cache_blocks` has seen the page as a full one; then it does not look at it again."""
        return page < self.num_cached_block.get(request_id, 0)

    def publish(self, request: Request, page: int, block: KVCacheBlock) -> None:
        """Make a page that has come back findable again, as `cache_blocks` did when it was written, or will
        do.
        """
        if self.enable_caching and self.has_passed(request.request_id, page):
            self.block_pool.cache_full_blocks(
                request, OneBlock(block), page, page + 1, self.block_size, self.kv_cache_group_id
            )
            if self._is_last:
                self.coordinator.host_pool.on_device.note_published([block])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Blocks whose lease the request still holds itself; the coordinator took the others out of the row
        before.
        """
        return [b for b in super().pop_blocks_for_free(request_id) if not b.is_null]
