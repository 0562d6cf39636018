"""The ops in plain PyTorch: slow, and meant to be read. The C++ and CUDA kernels are tested against it.

Arguments are those of the wrappers of the same name in `regions.py` and `pages.py`, which document them. Any
device works; every call synchronises.
"""

from collections.abc import Sequence
from typing import Any

import torch

HITS, MISSES, RESIDENT, OVERFLOW, UNREADABLE = range(5)
LRU, LRFU = range(2)

SELECTION = ("topk", "query_start", "resident", "host", "slot_of", "part")

EMPTY_KEY = -(2**31)
BIAS = 128
MAX_AGE = 1023
MAX_GHOST = 32767
# GAIN[d] = round(16 * log2(1 + 2**(-d / 16))), 0 from d = 89 on.
GAIN = (
    [16, 16, 15, 15, 14, 14, 13, 13, 12, 12, 12, 11, 11, 10, 10, 10, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7]
    + [6] * 5 + [5] * 5 + [4] * 6 + [3] * 9 + [2] * 12 + [1] * 26
)  # fmt: skip


def lrfu_touch(key: int, clock: int) -> int:
    """Key after one more reference at step `clock`; `key` 0 means none before.

    A reference made d steps ago weighs 2**(-d / 16). The key is the base-2 logarithm of the sum of the
    weights, seen from step 0 instead of from now, in 1/16: it does not change while nothing is referenced.
    (LRFU, Lee et al. 2001, in fixed point.)
    """
    now = clock + BIAS
    distance = abs(key - now)
    return max(key, now) + (GAIN[distance] if distance < len(GAIN) else 0)


def lrfu_age(key: int, clock: int) -> int:
    """1 .. MAX_AGE; what was less useful is older."""
    return min(clock + 2 * BIAS - key, MAX_AGE)


def ghost_of_key(key: int) -> int:
    """What slot_of holds for a position that was evicted with this key: at most -1."""
    return -1 - min(key >> 1, MAX_GHOST)


def key_of_ghost(slot: int) -> int:
    """The key, rounded down to even, that `ghost_of_key` was given; 0 for -1."""
    return 2 * (-1 - slot)


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
    policy: int,
) -> None:
    rows.fill_(-1)
    plan_count.zero_()
    starts = query_start.tolist()
    for r in range(len(starts) - 1):
        q, n, num_slots, _ = batch[r].tolist()
        begin, end = starts[r], starts[r + 1]
        if q < 0:
            continue
        position = topk[begin:end].long()  # [query rows, K]
        valid = (position >= 0) & (position < host.shape[1] * block_size)
        page = torch.where(valid, position // block_size, 0)
        readable = valid & (resident[parts[0], q][page] >= 0)
        on_host = valid & ~readable & (host[q][page] >= 0)
        for i, part in enumerate(parts):
            physical = resident[part, q][page].long() * block_stride_rows + position % block_size
            rows[i, begin:end][readable] = physical[readable].int()
        counters[RESIDENT] += readable.sum()
        counters[UNREADABLE] += (valid & ~readable & ~on_host).sum()

        if end - begin > max_query_rows or n < 0 or num_slots == 0 or not on_host.any():
            continue
        clock[n] += 1
        state = (slot_of[n], position_of[n], key[n], int(clock[n]))
        wanted = list(dict.fromkeys(position[on_host].tolist()))  # distinct, in order of first occurrence
        num_hits, loaded = _place(wanted, num_slots, *state, policy)
        for i, (p, slot) in enumerate(loaded):
            plan_host_row[r, i] = int(host[q, p // block_size]) * block_size + p % block_size
            plan_slot[r, i] = slot
        plan_count[r] = len(loaded)
        counters[HITS] += num_hits
        counters[MISSES] += len(wanted) - num_hits
        counters[OVERFLOW] += len(wanted) - num_hits - len(loaded)

        slots = slot_of[n][torch.where(on_host, position, 0)].long()
        in_slot = on_host & (slots >= 0)
        slots = slots.clamp(min=0)
        for i, part in enumerate(parts):
            physical = hot[part, n][slots // block_size].long() * block_stride_rows + slots % block_size
            rows[i, begin:end][in_slot] = physical[in_slot].int()
    counts.copy_((rows[0] >= 0).sum(-1))


def _place(
    wanted: list[int],
    num_slots: int,
    slot_of: torch.Tensor,
    position_of: torch.Tensor,
    key: torch.Tensor,
    clock: int,
    policy: int,
) -> tuple[int, list[tuple[int, int]]]:
    """One step of one region: touches the hits and gives the misses slots.

    Returns the number of hits and (position, slot) of each row to load. State: slot_of [max_positions],
    position_of and key [max_slots].
    """
    held = {p: int(slot_of[p]) for p in wanted}
    hit_slots = {slot for slot in held.values() if slot >= 0}
    misses = [p for p in wanted if held[p] < 0]
    positions, keys = position_of.tolist(), key.tolist()

    def rank(slot: int) -> tuple[bool, int, int]:
        order = keys[slot] if policy == LRU else -lrfu_age(keys[slot], clock)
        return positions[slot] >= 0, order, slot  # empty slots first

    candidates = sorted((slot for slot in range(num_slots) if slot not in hit_slots), key=rank)
    victims = sorted(candidates[: len(misses)])
    for slot in hit_slots:
        key[slot] = 2 * clock + 1 if policy == LRU else lrfu_touch(keys[slot], clock)
    loaded = list(zip(misses, victims, strict=False))  # the misses left over stay where they are
    for p, slot in loaded:
        if positions[slot] >= 0:
            slot_of[positions[slot]] = -1 if policy == LRU else ghost_of_key(keys[slot])
        key[slot] = 2 * clock if policy == LRU else lrfu_touch(key_of_ghost(held[p]), clock)
        slot_of[p] = slot
        position_of[slot] = p
    return len(hit_slots), loaded


def forget(
    slot_of: torch.Tensor,
    position_of: torch.Tensor,
    key: torch.Tensor,
    clock: torch.Tensor,
    regions: torch.Tensor,
    first_slot: torch.Tensor,
    first_position: torch.Tensor,
) -> None:
    slots = torch.arange(position_of.shape[1], device=position_of.device)
    for n, slot, position in zip(regions.tolist(), first_slot.tolist(), first_position.tolist(), strict=True):
        dropped = (position_of[n] >= 0) & ((slots >= slot) | (position_of[n] >= position))
        slot_of[n, position_of[n][dropped].long()] = -1
        position_of[n][dropped] = -1
        key[n][dropped] = EMPTY_KEY
        slot_of[n, max(position, 0) :] = -1
        if slot <= 0:
            slot_of[n] = -1
            clock[n] = 0


def write_words(words: torch.Tensor, at: Sequence[int], value: Sequence[int]) -> None:
    for index, word in zip(at, value, strict=True):
        words[index] = word


def fetch(
    group_host: torch.Tensor,
    pool: torch.Tensor,
    layer_offset: torch.Tensor,
    layer_part: torch.Tensor,
    plan_host_row: torch.Tensor,
    plan_slot: torch.Tensor,
    plan_count: torch.Tensor,
    batch: torch.Tensor,
    hot: torch.Tensor,
    row_bytes: int,
    block_size: int,
    block_stride_bytes: int,
    skip_io: bool,
) -> None:
    if skip_io:
        return
    layers = list(zip(layer_offset.tolist(), layer_part.tolist(), strict=True))
    for r, count in enumerate(plan_count.tolist()):
        for i in range(count):
            n = int(batch[r, 1])
            host_row = group_host[int(plan_host_row[r, i])].view(len(layers), row_bytes)
            slot = int(plan_slot[r, i])
            for layer, (offset, part) in enumerate(layers):
                block = int(hot[part, n, slot // block_size])
                start = block * block_stride_bytes + offset + slot % block_size * row_bytes
                pool[start : start + row_bytes] = host_row[layer]


def fetch_selected(**arguments: Any) -> None:
    """By name. The plan says it all: the selection lets a device begin earlier, and changes nothing."""
    fetch(**{name: value for name, value in arguments.items() if name not in SELECTION})


def _page_rows(
    memory: torch.Tensor, start: int, stride: int, block_size: int, row_bytes: int
) -> torch.Tensor:
    """A page's rows, [block_size, row_bytes], `stride` bytes apart, as a view of `memory`."""
    return memory.as_strided((block_size, row_bytes), (stride, 1), memory.storage_offset() + start)


def _copy_pages(
    pool: torch.Tensor,
    host: torch.Tensor,
    page_blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    layers: tuple[torch.Tensor, ...],
    row_bytes: int,
    block_size: int,
    block_stride_bytes: int,
    to_host: bool,
) -> None:
    for offset, part, host_offset, host_stride in zip(*(values.tolist() for values in layers), strict=True):
        for block, host_block in zip(page_blocks[part].tolist(), host_blocks.tolist(), strict=True):
            if block < 0 or host_block < 0:
                continue
            start, host_start = (
                block * block_stride_bytes + offset,
                host_block * block_size * host_stride + host_offset,
            )
            device_rows = _page_rows(pool, start, row_bytes, block_size, row_bytes)
            host_rows = _page_rows(host, host_start, host_stride, block_size, row_bytes)
            if to_host:
                host_rows.copy_(device_rows)
            else:
                device_rows.copy_(host_rows)


def write_pages(
    pool: torch.Tensor,
    host: torch.Tensor,
    page_blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    layer_offset: torch.Tensor,
    layer_part: torch.Tensor,
    host_offset: torch.Tensor,
    host_row_stride: torch.Tensor,
    row_bytes: int,
    block_size: int,
    block_stride_bytes: int,
) -> None:
    layers = (layer_offset, layer_part, host_offset, host_row_stride)
    _copy_pages(
        pool, host, page_blocks, host_blocks, layers, row_bytes, block_size, block_stride_bytes, to_host=True
    )


def read_pages(
    pool: torch.Tensor,
    host: torch.Tensor,
    page_blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    layer_offset: torch.Tensor,
    layer_part: torch.Tensor,
    host_offset: torch.Tensor,
    host_row_stride: torch.Tensor,
    row_bytes: int,
    block_size: int,
    block_stride_bytes: int,
) -> None:
    layers = (layer_offset, layer_part, host_offset, host_row_stride)
    _copy_pages(
        pool, host, page_blocks, host_blocks, layers, row_bytes, block_size, block_stride_bytes, to_host=False
    )


def gather_pages(
    pool: torch.Tensor,
    host: torch.Tensor,
    staging: torch.Tensor,
    device_blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    layer_offset: int,
    host_offset: int,
    host_row_stride: int,
    row_bytes: int,
    block_size: int,
    block_stride_bytes: int,
) -> None:
    for i, (block, host_block) in enumerate(zip(device_blocks.tolist(), host_blocks.tolist(), strict=True)):
        page = staging[i * block_size : (i + 1) * block_size]
        if block >= 0:
            start = block * block_stride_bytes + layer_offset
            page.copy_(_page_rows(pool, start, row_bytes, block_size, row_bytes))
        elif host_block >= 0:
            start = host_block * block_size * host_row_stride + host_offset
            page.copy_(_page_rows(host, start, host_row_stride, block_size, row_bytes))
