"""Who is admitted next: first come, first served, unless that costs the prefixes of those that come next.

With more sessions than the device can keep keys for, a newcomer's prefill pushes out the keys that a request
behind it would have found. When that one is served, its own prefill pushes out the next one's, and from then
on every turn of every session is prefilled from its start. So a *cold* request, one that would prefill most
of its prompt at the expense of kept keys, lets *warm* ones pass, whose prefix is there: a limited number for
each cold one that is admitted, so that nobody waits for ever.

vLLM leaves a request for the next step if its connector cannot say yet how much of it can be loaded. That is
how a request is put off. It can only be one that has not started; where priorities count, nobody passes a
more urgent one.

vLLM looks up the prefix of every request that it asks about, in every step, and to find a warm one we look up
those that wait: a millisecond each for a long prompt, more than a decode step takes if many wait. So what was
found stands until requests come, start or end, or for some steps, and a request that stays put off is not
looked up; nor is one that has been refused (`refusal.py`).
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request

if TYPE_CHECKING:
    from .coordinator import HiSparseCoordinator

__all__ = ["QueueOrder"]

WARM_SHARE = 0.5  # of a request's tokens
LONG_SHARE = 0.5  # of the tokens of a request that may pass
MAX_AGE = 16  # steps for which what was found about prefixes stands: they come and go in the meantime


class QueueOrder:
    """The order of one engine's waiting requests."""

    def __init__(self, coordinator: "HiSparseCoordinator", manager: KVCacheManager) -> None:
        self._coordinator = coordinator
        self._manager = manager
        config = coordinator.config
        self._max_passing = config.max_passing if config.prefix_share > 0 else 0
        self._num_passed = 0  # since a cold request was admitted
        self._put_off: set[str] = set()
        self._asked = ("", False)  # request that vLLM asked about last, and whether it is warm
        self._look_up = manager.get_computed_blocks
        self._nothing = manager.empty_kv_cache_blocks
        # What was found, `_age` steps ago.
        self._age = 0
        self._stay_put_off: set[str] = set()
        self._warm: Request | None = None
        self._is_nobody_warm = False

    def look_up(self, request: Request, *limits: Any) -> tuple[KVCacheBlocks, int, int]:
        """See `KVCacheManager.get_computed_blocks`; nothing for a request that is not admitted anyway."""
        if self._coordinator.refusal.stands(request.request_id):
            return self._nothing, 0, 0
        if request.request_id in self._stay_put_off:
            if self._coordinator.records and self._costs_kept(request):
                return self._nothing, 0, 0
            self._stay_put_off.remove(request.request_id)
        return self._look_up(request, *limits)

    def must_wait(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request has to let others pass. `num_computed_tokens`: of its prefix hit."""
        if request.request_id in self._stay_put_off:
            return True
        if self._coordinator.refusal.stands(request.request_id):
            return False  # it is refused
        is_warm = _is_warm_hit(request, num_computed_tokens)
        if request is self._warm and not is_warm:
            self._reconsider()  # its prefix is gone
        self._asked = (request.request_id, is_warm)
        if self._num_passed >= self._max_passing or self._coordinator.has_company:
            return False
        if is_warm or request.num_preemptions:
            return False
        is_busy = bool(self._coordinator.records)  # somebody will end, and this is asked again
        must_wait = is_busy and self._costs_kept(request) and self._is_passable(request)
        if must_wait:
            self._put_off.add(request.request_id)
            self._stay_put_off.add(request.request_id)
        return must_wait

    def note_arrival(self) -> None:
        """A request has come, which may be warm."""
        self._is_nobody_warm = False
        self._coordinator.refusal.lift()

    def note_admission(self, request: Request) -> None:
        """vLLM has given the request blocks."""
        self._coordinator.refusal.lift()
        request_id, is_warm = self._asked
        if request_id != request.request_id:
            return
        self.forget(request_id)
        if not is_warm:
            self._num_passed = 0
        elif self._put_off:
            self._num_passed += 1
            self._coordinator.num_passed += 1

    def forget(self, request_id: str) -> None:
        """The request waits no more, or has ended."""
        self._put_off.discard(request_id)
        self._reconsider()

    def end_step(self) -> None:
        """What was found gets older, a refusal too."""
        self._age += 1
        if self._age >= MAX_AGE:
            self._reconsider()

    def _reconsider(self) -> None:
        self._age = 0
        self._coordinator.refusal.lift()
        self._stay_put_off.clear()
        self._warm, self._is_nobody_warm = None, False

    def _costs_kept(self, request: Request) -> bool:
        """Whether the pool were below its low watermark with the request and all keys that are kept."""
        coordinator = self._coordinator
        need = coordinator.allocations.num_at_a_time(request.num_tokens)
        return need + coordinator.pressure.low > coordinator.leases.order.num_unkept

    def _is_passable(self, request: Request) -> bool:
        """Whether a warm request waits that may pass this one: no shorter one, which costs too little."""
        if self._warm is None or not self._is_waiting(self._warm):
            self._warm = None if self._is_nobody_warm else self._find_warm()
            self._is_nobody_warm = self._warm is None
        warm = self._warm
        if warm is None:
            return False
        return warm.priority <= request.priority and request.num_tokens >= LONG_SHARE * warm.num_tokens

    def _find_warm(self) -> Request | None:
        waiting = filter(self._is_waiting, self._coordinator.requests.values())
        return next(filter(self._is_warm, waiting), None)

    def _is_waiting(self, request: Request) -> bool:
        request_id = request.request_id
        return request_id in self._coordinator.requests and request_id not in self._coordinator.records

    def _is_warm(self, request: Request) -> bool:
        if not self._manager.prefix_cache_lookup_enabled(request):
            return False
        layout = self._coordinator.layout
        indexer_tokens = layout.page_tokens * layout.indexer_pages
        if not self._find_hit(request, 2 * indexer_tokens):
            return False  # as a rule it has all its pages on the host, and no keys: those are not looked up
        longest = int(WARM_SHARE * request.num_tokens) + 1 + indexer_tokens
        return _is_warm_hit(request, self._find_hit(request, longest))

    def _find_hit(self, request: Request, longest: int) -> int:
        """Tokens of the request's prefix hit, counted up to `longest`."""
        limit = min(longest, request.num_tokens - 1)
        hit = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, limit)
        return int(hit[1])


def _is_warm_hit(request: Request, num_computed_tokens: int) -> bool:
    return num_computed_tokens >= WARM_SHARE * request.num_tokens
