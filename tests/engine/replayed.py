"""A running engine's worker side, recorded and replayed through the plain reference of the resolver.

`Recorder` keeps what a rank was told (messages) and what its indexers selected. `replay` applies that to
tables of its own and to `ops.reference`; the product's tables, compiled ops and counters have no part in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ops.case import batch_rows
from vllm_hisparse.messages import StepMessage, decode
from vllm_hisparse.ops import EMPTY_KEY, Policy, reference
from vllm_hisparse.runtime.resolver import GroupResolver
from vllm_hisparse.testing.harness import HiSparseEngine
from vllm_hisparse.testing.models import TinyModel

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Selection:
    """What a leader selected: int32 [tokens, K] positions of batch rows `query_start` int32 [rows + 1]."""

    group: int
    topk: torch.Tensor
    query_start: torch.Tensor


class Recorder:
    """Steps of one rank, from its start: (message, requests of the batch), and selections, in order."""

    def __init__(self, engine: HiSparseEngine, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[StepMessage, list[str]] | Selection] = []
        worker, runtime = engine.worker, engine.runtime
        begin_step, resolve = worker.begin_step, GroupResolver.resolve
        groups = {id(resolver): group for group, resolver in enumerate(runtime.resolvers)}

        def begin(payload: bytes, request_ids: list[str], lengths: Any = None) -> None:
            self.events.append((decode(payload), list(request_ids)))
            begin_step(payload, request_ids, lengths)

        def note(resolver: GroupResolver, topk: torch.Tensor, query_start: torch.Tensor) -> None:
            self.events.append(Selection(groups[id(resolver)], topk.clone(), query_start.clone()))
            resolve(resolver, topk, query_start)

        patch.setattr(worker, "begin_step", begin)
        patch.setattr(GroupResolver, "resolve", note)


def layers_of_groups(model: TinyModel) -> list[int]:
    """Layers that share each selection."""
    return [1 + len(followers) for followers in model.index_pattern.split("F")[1:]]


def row_bytes(model: TinyModel, item: int) -> int:
    """KV of a token in a layer: latent and rotary part, `item` bytes an element."""
    return (model.widths.kv_rank + model.widths.rope) * item


class Tables:
    """Where a request's pages are, as the messages say: device block of part 0, or host block."""

    def __init__(self, layout: Any) -> None:
        requests, pages = layout.max_requests, layout.max_pages
        self.slots: dict[str, int] = {}
        self.resident = torch.full((1, requests, pages), -1, dtype=torch.int32)
        self.host = torch.full((requests, pages), -1, dtype=torch.int32)
        self.hot = torch.full((1, layout.num_regions, layout.max_hot_blocks), -1, dtype=torch.int32)
        self.hot_rows = torch.zeros(layout.num_regions, dtype=torch.int32)
        self.hot_region = torch.full((requests,), -1, dtype=torch.int32)
        self.row_request = torch.full((requests,), -1, dtype=torch.int32)

    def apply(self, message: StepMessage, batch: list[str]) -> dict[int, int]:
        """One step. Returns the slots that each region of the message keeps."""
        for request_id in message.unbind:
            del self.slots[request_id]
        owned_before = {
            int(region): slot for slot, region in enumerate(self.hot_region.tolist()) if region >= 0
        }
        for request_id, slot in message.bind:
            self.slots[request_id] = slot
            self.resident[:, slot] = self.host[slot] = self.hot_region[slot] = -1
            owned_before = {region: owner for region, owner in owned_before.items() if owner != slot}
        kept = {}
        for slot, region, num_rows, num_kept, blocks in message.regions:
            self.hot_region[slot] = region
            if region >= 0:
                same = owned_before.get(region) == slot
                kept[region] = num_kept if same else 0
                self.hot_rows[region] = num_rows
                self.hot[0, region, : len(blocks[0])] = torch.tensor(blocks[0], dtype=torch.int32)
        for slot, page, device_blocks, host_block in message.pages:
            self.resident[0, slot, page], self.host[slot, page] = device_blocks[0], host_block
        self.row_request.fill_(-1)
        self.row_request[: len(batch)] = torch.tensor([self.slots[r] for r in batch], dtype=torch.int32)
        return kept


class State:
    """Hot regions of one index group."""

    def __init__(self, layout: Any) -> None:
        regions, slots = layout.num_regions, layout.max_hot_rows
        self.slot_of = torch.full((regions, layout.max_pages * PAGE_TOKENS), -1, dtype=torch.int16)
        self.position_of = torch.full((regions, slots), -1, dtype=torch.int32)
        self.key = torch.full((regions, slots), EMPTY_KEY, dtype=torch.int32)
        self.clock = torch.zeros(regions, dtype=torch.int32)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.slot_of, self.position_of, self.key, self.clock

    def keep(self, kept: dict[int, int]) -> None:
        """Forget what is not in the slots that regions keep."""
        ids, slots = torch.tensor(list(kept)), torch.tensor(list(kept.values()))
        never = torch.full_like(ids, self.slot_of.shape[1])
        reference.forget(*self.tensors, ids, slots, never)


def replay(recorder: Recorder, engine: HiSparseEngine, model: TinyModel, item: int) -> Counter[str]:
    """What a rank has to have counted since its start, by metric."""
    layout, config = engine.runtime.layout, engine.runtime.config
    groups, row = layers_of_groups(model), row_bytes(model, item)
    tables, states = Tables(layout), [State(layout) for _ in groups]
    counted = Counter[str]()
    for event in recorder.events:
        if not isinstance(event, Selection):
            message, batch = event
            if kept := tables.apply(message, batch):
                for state in states:
                    state.keep(kept)
            page_bytes = sum(groups) * PAGE_TOKENS * row
            counted["spilled_bytes"] += len(message.spill) * page_bytes
            counted["restored_bytes"] += len(message.restore) * page_bytes
            continue
        counted["prefill_read_bytes"] += (
            _num_staged(tables, event, config) * groups[event.group] * PAGE_TOKENS * row
        )
        counters, num_read = _resolve(tables, states[event.group], event, config)
        for name in ("hits", "misses", "resident_rows", "unreadable_rows", "overflowed_rows"):
            counted[name] += int(counters[COUNTERS[name]])
        counted["host_read_bytes"] += num_read * groups[event.group] * row
    return counted


COUNTERS = {
    "hits": reference.HITS,
    "misses": reference.MISSES,
    "resident_rows": reference.RESIDENT,
    "overflowed_rows": reference.OVERFLOW,
    "unreadable_rows": reference.UNREADABLE,
}


def _resolve(tables: Tables, state: State, selection: Selection, config: Any) -> tuple[torch.Tensor, int]:
    """(counts of one resolve, rows that it reads from the host)."""
    topk, num_requests = selection.topk, tables.host.shape[0]
    plan = torch.zeros((num_requests, config.floor_hot_rows), dtype=torch.int32)
    plan_count, counters = torch.zeros(num_requests, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    reference.resolve(
        topk,
        selection.query_start,
        torch.empty((1, *topk.shape), dtype=torch.int32),
        torch.empty(topk.shape[0], dtype=torch.int32),
        tables.resident,
        tables.host,
        tables.hot,
        batch_rows(tables.row_request, tables.hot_region, tables.hot_rows),
        *state.tensors,
        plan,
        torch.zeros_like(plan),
        plan_count,
        counters,
        parts=[0],
        block_size=PAGE_TOKENS,
        block_stride_rows=PAGE_TOKENS,
        max_query_rows=config.verify_rows,
        policy=Policy[config.policy.upper()],
    )
    return counters, int(plan_count.sum())


def _num_staged(tables: Tables, selection: Selection, config: Any) -> int:
    """Pages that the prefills of a step read from the host: all that they select and only the host has.

    The tests' staging area takes all pages of a request at once, so none is read twice.
    """
    bounds, found = selection.query_start.tolist(), 0
    for slot, first, end in zip(tables.row_request.tolist(), bounds, bounds[1:], strict=False):
        if slot >= 0 and end - first > config.verify_rows:
            positions = selection.topk[first:end].unique().tolist()
            for page in {position // PAGE_TOKENS for position in positions if position >= 0}:
                found += int(tables.resident[0, slot, page]) < 0 <= int(tables.host[slot, page])
    return found
