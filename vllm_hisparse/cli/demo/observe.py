"""Turns an engine's state after a step into a frame."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_hisparse.cli.demo import sizes
from vllm_hisparse.cli.demo.frames import Cell, Phase, RequestFrame, Step
from vllm_hisparse.scheduler.snapshot import (
    CellKind,
    PoolCell,
    free_cells,
    page_states,
    pool_cells,
    snapshot,
)

__all__ = ["HiSparseObserver", "Observer", "make_observer"]

NUM_SHOWN_TOKENS = 48


class Observer:
    """Watches a scheduler of plain vLLM. One call of `step` after every engine step."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._index = 0
        self._num_tokens = dict.fromkeys(sizes.NAMES, 0)
        self._preemptions = dict.fromkeys(sizes.NAMES, 0)

    def step(self, tokens: Mapping[str, Sequence[int]]) -> Step:
        """The step's frame. `tokens`: every request's new tokens since the start."""
        self._index += 1
        got_token = {name for name, ids in tokens.items() if len(ids) > self._num_tokens[name]}
        self._num_tokens.update((name, len(ids)) for name, ids in tokens.items())
        by_name = {_name(request_id): r for request_id, r in self.scheduler.requests.items()}
        return Step(
            index=self._index,
            num_decoding=len(got_token),
            requests=tuple(
                self._request(name, by_name.get(name), tokens.get(name, ()), name in got_token)
                for name in sizes.NAMES
            ),
            cells=tuple(Cell(cell.kind, _name(cell.request_id)) for cell in self.cells()),
            num_free_blocks=self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            **self.totals(),
        )

    def cells(self) -> Sequence[PoolCell]:
        """The device pool. A block of plain vLLM holds a page's KV and its indexer keys."""
        manager = self.scheduler.kv_cache_manager
        cells = free_cells(manager.block_pool)
        for group in manager.coordinator.single_type_managers:
            for request_id, blocks in group.req_to_blocks.items():
                for block in (b for b in blocks if not b.is_null):
                    cells[block.block_id] = PoolCell(CellKind.RESIDENT, request_id)
        null_id = manager.block_pool.null_block.block_id
        return [cell for block_id, cell in enumerate(cells) if block_id != null_id]

    def totals(self) -> dict[str, int]:
        """Further fields of the frame: none."""
        return {}

    def residency(self, request_id: str) -> dict[str, Any]:
        """Further fields of a request's frame: none."""
        return {}

    def _request(self, name: str, request: Any, tokens: Sequence[int], got_token: bool) -> RequestFrame:
        if request is not None:
            self._preemptions[name] = request.num_preemptions
        return RequestFrame(
            name=name,
            phase=_phase(request, got_token),
            prompt_tokens=sizes.PROMPT_TOKENS[sizes.NAMES.index(name)],
            tokens=tuple(tokens[-NUM_SHOWN_TOKENS:]),
            num_new_tokens=len(tokens),
            num_preemptions=self._preemptions[name],
            **({} if request is None else self.residency(request.request_id)),
        )


class HiSparseObserver(Observer):
    """Adds residency, pages, the host pool and the resolver's counters."""

    def cells(self) -> Sequence[PoolCell]:
        """The device pool as the coordinator uses it."""
        return pool_cells(self.scheduler.connector.coordinator)

    def totals(self) -> dict[str, int]:
        """Counters since the start."""
        from vllm_hisparse import ops
        from vllm_hisparse.runtime.binding import current_runtime

        state = snapshot(self.scheduler.connector.coordinator)
        runtime = current_runtime()
        rows = runtime.counters.rows.tolist()  # [index groups][counters]; the CPU has no stream to wait for
        layers = [len(names) for names in runtime.layout.index_groups]
        missed = [r[ops.Counter.MISSES] - r[ops.Counter.OVERFLOW] for r in rows]
        return {
            "num_used_host_blocks": state.num_used_host_blocks,
            "spilled_pages": state.page_events["spilled"],
            "hits": sum(r[ops.Counter.HITS] for r in rows),
            "misses": sum(r[ops.Counter.MISSES] for r in rows),
            "host_rows_read": sum(
                n * layers_of_group for n, layers_of_group in zip(missed, layers, strict=True)
            ),
        }

    def residency(self, request_id: str) -> dict[str, Any]:
        """Residency, states of all pages, slots of the hot region."""
        coordinator = self.scheduler.connector.coordinator
        held = {r.request_id: r for r in snapshot(coordinator).requests}.get(request_id)
        if held is None:
            return {}
        pages = tuple(state.name.lower() for state in page_states(coordinator, request_id))
        return {"pages": pages, "residency": held.residency, "hot_rows": held.hot_rows}


def make_observer(scheduler: Any) -> Observer:
    """The one that fits the scheduler."""
    return HiSparseObserver(scheduler) if scheduler.connector is not None else Observer(scheduler)


def _name(request_id: str) -> str:
    """The name a request was added with; vLLM appends "-" and a random suffix."""
    return request_id.split("-")[0]


def _phase(request: Any, got_token: bool) -> Phase:
    if request is None:
        return Phase.FINISHED
    if request.status.name == "PREEMPTED":
        return Phase.PREEMPTED
    if request.status.name != "RUNNING":
        return Phase.WAITING
    return Phase.DECODING if got_token else Phase.PREFILL
