"""How fast a device reads pinned host memory: by its copy engine, and in rows by our own kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_hisparse.config import MIB

if TYPE_CHECKING:
    import torch

__all__ = ["copy_gb_per_s", "fetch_gb_per_s", "fetch_rows"]

COPY_BYTES = 512 * MIB
NUM_COPIES = 5
ROW_BYTES, LAYERS, BLOCK_SIZE = 656, 4, 64  # fp8 rows of four layers that share a selection
NUM_REQUESTS, NUM_MISSES = 32, 1024  # of a step, a request


def copy_gb_per_s(index: int) -> float | None:
    """GB/s of the copy engine, pinned host memory to device `index`; None if there is no memory for it."""
    import torch

    try:
        with torch.cuda.device(index):
            source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
            return COPY_BYTES / _median_ms(lambda: target.copy_(source, non_blocking=True)) / 1e6
    except RuntimeError:
        return None


def fetch_gb_per_s(index: int) -> float | None:
    """GB/s of `ops.fetch` with scattered rows of four layers, as a step of 32 requests reads them.

    None if the library does not load, or there is no memory for it.
    """
    import torch

    from vllm_hisparse.ops import LibraryError, load_library

    try:
        load_library("cuda")
        with torch.cuda.device(index):
            host = torch.empty(
                (COPY_BYTES // (LAYERS * ROW_BYTES), LAYERS * ROW_BYTES), dtype=torch.uint8, pin_memory=True
            )
            fetch, _, rows = fetch_rows(host, torch.device("cuda", index))
            return rows.numel() * LAYERS * ROW_BYTES / _median_ms(fetch) / 1e6
    except (LibraryError, RuntimeError):
        return None


def fetch_rows(
    host: torch.Tensor, device: torch.device, requests: int = NUM_REQUESTS, misses: int = NUM_MISSES
) -> tuple[Callable[[], object], torch.Tensor, torch.Tensor]:
    """(a call that fetches rows of `host` uint8 [n, LAYERS * ROW_BYTES], the pool on `device` they go to,
    their numbers [requests, misses]). A request's i-th row goes to slot i of its region; region r has the
    blocks from r * misses / BLOCK_SIZE on.
    """
    import torch

    from vllm_hisparse import ops

    def integers(values: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return values.to(dtype).contiguous().to(device)

    blocks, stride = misses // BLOCK_SIZE, BLOCK_SIZE * LAYERS * ROW_BYTES
    pool = torch.zeros(requests * blocks * stride, dtype=torch.uint8, device=device)
    rows = torch.randint(len(host), (requests, misses), generator=torch.Generator().manual_seed(0))
    each = torch.arange(requests)
    arguments = (
        integers(torch.arange(LAYERS) * BLOCK_SIZE * ROW_BYTES, torch.int64),
        integers(torch.zeros(LAYERS)),
        integers(rows),
        integers(torch.arange(misses).expand(requests, misses)),
        integers(torch.full((requests,), misses)),
        integers(ops.make_batch(each, each, torch.full_like(each, misses))),
        integers(torch.arange(requests * blocks).view(1, requests, blocks)),
    )
    return lambda: ops.fetch(host, pool, *arguments, ROW_BYTES, BLOCK_SIZE, stride), pool, rows


def _median_ms(run: Callable[[], object]) -> float:
    """Device time of `run` on the current stream; the first of a few does not count."""
    import torch

    times = []
    for _ in range(1 + NUM_COPIES):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[NUM_COPIES // 2]
