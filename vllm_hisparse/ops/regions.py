"""Ops on hot regions: `resolve` in every decode step, `forget` between steps.

All work in place on tensors that the caller owns, on the current stream of their device, without an
allocation or a synchronisation, and may be captured in a CUDA graph. The library checks dtypes, shapes,
layouts and devices before it touches memory; what it refuses is explained here, so that a right call pays for
no more.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch

from vllm_hisparse.ops.checks import ShapeCheck
from vllm_hisparse.ops.load import require_loaded

INT16, INT32, INT64 = torch.int16, torch.int32, torch.int64
MAX_SLOTS = 2**15
MAX_PARTS = 4
EMPTY_KEY = -(2**31)


class Policy(IntEnum):
    """How a hot region chooses the rows that give way."""

    LRU = 0
    """The reference: least recently used; a step's hits are newer than the rows it loads."""
    LRFU = 1
    """Recency and frequency: a reference loses 4 % of its weight a step; history outlives an eviction."""


class Counter(IntEnum):
    """Entries of `counters`. Hits, misses and overflow count distinct positions of a request and step."""

    HITS = 0
    MISSES = 1
    """Overflowing ones included."""
    RESIDENT = 2
    """Selection entries served from resident pages; duplicates count."""
    OVERFLOW = 3
    """Misses that found no slot to take because the step reads every slot."""
    UNREADABLE = 4
    """Selection entries whose page is neither on the device nor on the host; duplicates count."""


def make_batch(request: torch.Tensor, region: torch.Tensor, num_slots: torch.Tensor) -> torch.Tensor:
    """int32 [R, 4], the `batch` of `resolve` and `fetch`, of int [R] each, on their device."""
    return torch.stack([request, region, num_slots, torch.zeros_like(request)], 1).int()


def resolve(
    topk: torch.Tensor,
    query_start: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    resident: torch.Tensor,
    host: torch.Tensor,
    hot: torch.Tensor,
    batch: torch.Tensor,
    slot_of: torch.Tensor,
    position_of: torch.Tensor,
    key: torch.Tensor,
    clock: torch.Tensor,
    plan_host_row: torch.Tensor,
    plan_slot: torch.Tensor,
    plan_count: torch.Tensor,
    counters: torch.Tensor,
    parts: Sequence[int],
    block_size: int,
    block_stride_rows: int,
    max_query_rows: int,
    policy: int = Policy.LRFU,
) -> None:
    """Turns a step's selection into physical rows, for one index group.

    A position on a resident page gives its row there. One whose page is only on the host gives a row of the
    request's hot region: where it already lies in a slot (hit), or in a slot that another position gives up
    (miss), whose read from the host is planned for `fetch`. No row that this step reads gives way, for any
    query row of the request.

    Selection and outputs, T query rows of R batch rows, K positions each:
        topk          int32 [T, K]  logical positions; outside 0 .. max_pages * block_size - 1: padding
        query_start   int32 [R + 1]  batch row r has the query rows query_start[r] .. query_start[r + 1] - 1
        rows          int32 [len(parts), T, K]  out: block * block_stride_rows + offset; -1: not available
        counts        int32 [T]  out: available entries of each query row
    Tables, read only:
        resident      int32 [engine parts, max_requests, max_pages]  device block, -1: none
        host          int32 [max_requests, max_pages]  host block of a page, -1: none
        hot           int32 [engine parts, num_regions, max_hot_blocks]  blocks in slot order
        batch         int32 [>= R, 4]  of each batch row: request, -1: none; hot region, -1: none; its usable
                      slots, at most max_slots; unused. At a multiple of 16 bytes. No two rows share a request
                      or a region
    State of the index group, updated (initially -1, -1, EMPTY_KEY, 0; unusable slots must be empty):
        slot_of       int16 [num_regions, max_positions]  slot of a position; negative: in no slot
        position_of   int32 [num_regions, max_slots]  position in a slot, -1: empty
        key           int32 [num_regions, max_slots]  what the policy knows of a slot, EMPTY_KEY: empty
        clock         int32 [num_regions]  steps in which the region was asked for a position
    Plan, out:
        plan_host_row int32 [>= R, capacity]  host_block * block_size + offset, in order of first occurrence
        plan_slot     int32 [>= R, capacity]  ascending; capacity >= min(max_query_rows * K, max_slots)
        plan_count    int32 [>= R]  entries of each batch row; 0 from R on
        counters      int64 [8]  added to, by `Counter`

    `parts` names the engine parts that hold the group's layers, one plane of `rows` each. A batch row with
    more than max_query_rows query rows (prefill) or without a region gets resident rows only, and leaves its
    region alone.

    Raises ValueError on a wrong dtype, shape, device or layout, LibraryError when no library is loaded.
    """
    require_loaded()
    arguments = (
        topk, query_start, rows, counts, resident, host, hot, batch, slot_of, position_of, key, clock,
        plan_host_row, plan_slot, plan_count, counters,
    )  # fmt: skip
    sizes = (list(parts), block_size, block_stride_rows, max_query_rows)
    try:
        torch.ops.hisparse.resolve(*arguments, *sizes, int(policy))
    except RuntimeError:
        _explain_resolve(arguments, *sizes)
        raise


def forget(
    slot_of: torch.Tensor,
    position_of: torch.Tensor,
    key: torch.Tensor,
    clock: torch.Tensor,
    regions: torch.Tensor,
    first_slot: torch.Tensor,
    first_position: torch.Tensor,
) -> None:
    """Drops rows of hot regions between steps, for one index group.

    For each i, region regions[i] forgets every slot from first_slot[i] on (a shrink: the new size) and every
    position from first_position[i] on, in a slot or evicted (a rewritten tail). first_slot 0 resets the
    region, clock included, for its next request. Pass max_slots and max_positions for "none".

    State as in `resolve`; regions, first_slot, first_position: int32 [m], on its device, no region twice.
    Raises ValueError and LibraryError as `resolve` does.
    """
    require_loaded()
    try:
        torch.ops.hisparse.forget(slot_of, position_of, key, clock, regions, first_slot, first_position)
    except RuntimeError:
        check = ShapeCheck("forget", slot_of.device)
        _check_state(check, slot_of, position_of, key, clock)
        check("regions", regions, INT32, ("m",))
        check("first_slot", first_slot, INT32, ("m",))
        check("first_position", first_position, INT32, ("m",))
        raise


def _explain_resolve(
    arguments: tuple[torch.Tensor, ...],
    parts: Sequence[int],
    block_size: int,
    block_stride_rows: int,
    max_query_rows: int,
) -> None:
    """Raises ValueError for the first argument that the library had a reason to refuse."""
    (
        topk, query_start, rows, counts, resident, host, hot, batch, slot_of, position_of, key, clock,
        plan_host_row, plan_slot, plan_count, counters,
    ) = arguments  # fmt: skip
    check = ShapeCheck("resolve", topk.device)
    check.positive(block_size=block_size, block_stride_rows=block_stride_rows, max_query_rows=max_query_rows)
    check("topk", topk, INT32, ("T", "K"))
    check.extents["R"] = query_start.numel() - 1
    check("query_start", query_start, INT32, (max(query_start.numel(), 1),))
    check("rows", rows, INT32, (len(parts), "T", "K"))
    check("counts", counts, INT32, ("T",))
    check("resident", resident, INT32, ("engine_parts", "max_requests", "max_pages"))
    check("host", host, INT32, ("max_requests", "max_pages"))
    check("hot", hot, INT32, ("engine_parts", "num_regions", "max_hot_blocks"))
    check("batch", batch, INT32, ("R+", 4))
    check.aligned("batch", batch, 16)
    _check_state(check, slot_of, position_of, key, clock)
    check("plan_host_row", plan_host_row, INT32, ("R+", "capacity"))
    check("plan_slot", plan_slot, INT32, ("R+", "capacity"))
    check("plan_count", plan_count, INT32, ("R+",))
    check("counters", counters, INT64, (8,))
    _check_sizes(check.extents, parts, block_size, max_query_rows)


def _check_state(
    check: ShapeCheck,
    slot_of: torch.Tensor,
    position_of: torch.Tensor,
    key: torch.Tensor,
    clock: torch.Tensor,
) -> None:
    check("slot_of", slot_of, INT16, ("num_regions", "max_positions"))
    check("position_of", position_of, INT32, ("num_regions", "max_slots"))
    check("key", key, INT32, ("num_regions", "max_slots"))
    check("clock", clock, INT32, ("num_regions",))


def _check_sizes(extents: dict[str, int], parts: Sequence[int], block_size: int, max_query_rows: int) -> None:
    """What the extents of different tensors owe each other."""
    if not 1 <= len(parts) <= MAX_PARTS or not all(0 <= part < extents["engine_parts"] for part in parts):
        raise ValueError(
            f"resolve: got parts {list(parts)}; need 1 .. {MAX_PARTS} below {extents['engine_parts']} "
            "because each names a plane of resident and hot"
        )
    num_positions = extents["max_pages"] * block_size
    if extents["max_positions"] < num_positions:
        raise ValueError(
            f"resolve: got max_positions {extents['max_positions']}; need {num_positions} = max_pages * "
            "block_size because every position that the tables know may be selected"
        )
    max_slots = extents["max_slots"]
    if not max_slots <= min(MAX_SLOTS, extents["max_hot_blocks"] * block_size):
        raise ValueError(
            f"resolve: got max_slots {max_slots}; need at most {MAX_SLOTS} for int16 slot numbers, "
            f"and {extents['max_hot_blocks'] * block_size} because that many rows fit max_hot_blocks"
        )
    capacity = min(max_query_rows * extents["K"], max_slots)
    if extents["capacity"] < capacity:
        raise ValueError(
            f"resolve: got a plan for {extents['capacity']} misses a batch row; need {capacity} = "
            "min(max_query_rows * K, max_slots) because a cold step misses them all"
        )
