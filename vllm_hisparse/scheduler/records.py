"""What the coordinator knows about one request."""

from dataclasses import dataclass

from vllm.v1.request import Request

from .regions import Region
from .residency import RECLAIMED, SETTLED, UNPINNABLE, PageState, PageTable

__all__ = ["Record"]


@dataclass(eq=False)
class Record:
    """A request that holds blocks. Pages' blocks are the managers'; this adds what only HiSparse knows."""

    request: Request
    pages: PageTable
    page_tokens: int
    slot: int = -1  # request slot at the workers; -1 until first scheduled
    region: Region | None = None
    num_sent: int = 0  # pages whose table entries the workers have
    next_spill: int = 0  # pages before this one were spilled or adopted
    num_misses: float = 0.0  # rows a step that its selections read from the host, lately; all index groups
    hot_pages: tuple[int, ...] = ()  # pages that its selections touch most, lately, hottest first
    num_slots: int = 0  # tokens that its blocks hold in every group; kept by `SteadySlots`
    next_publication: int = 0  # tokens that are known when vLLM has to look for pages to publish again
    is_importing: bool = False  # its pages are on their way from another engine, until it is scheduled
    is_lent: bool = False  # it has ended, and another engine reads its pages
    alive: bool = True  # False once the request's blocks are gone; transfers may still refer to the record

    @property
    def request_id(self) -> str:
        """vLLM's id of the request."""
        return self.request.request_id

    @property
    def needs_region(self) -> bool:
        """Whether some page may have to be read from the host now or as soon as a block is reused."""
        return self.pages.num_host_only > 0 or self.pages.count(*RECLAIMED) > 0

    @property
    def has_backed(self) -> bool:
        """Whether it has a region, or a page that the device can give up for one."""
        return self.region is not None or self.pages.num_unpinnable > 0

    @property
    def is_parked(self) -> bool:
        """Whether another engine writes or reads its pages now, so that none of them may be moved."""
        return self.is_importing or self.is_lent

    @property
    def unpinnable(self) -> frozenset[PageState]:
        """States of pages whose device lease may go back. Pages that another engine is going to read have to
        be whole on some tier when the request ends.
        """
        params = self.request.kv_transfer_params
        return SETTLED if params and params.get("do_remote_decode") else UNPINNABLE

    def num_sealed(self, num_reprefillable: int) -> int:
        """Pages that no step writes again: full, and written by steps whose output has been processed.

        Tokens in flight may be rolled back (rejected drafts) and the last `num_reprefillable` may be
        rewritten.
        """
        return self.num_written(num_reprefillable + self.request.num_in_flight_tokens)

    def num_written(self, num_open_tokens: int) -> int:
        """Pages that the steps scheduled so far fill, up to the last `num_open_tokens` tokens."""
        settled = self.request.num_computed_tokens - num_open_tokens
        return min(max(settled, 0) // self.page_tokens, len(self.pages))

    def num_pages_left(self, page: int) -> int:
        """Pages from `page` on, if the request generates all it may."""
        tokens = self.request.num_prompt_tokens + self.request.max_tokens
        return max(-(-tokens // self.page_tokens) - page, 1)
