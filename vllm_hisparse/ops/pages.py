"""Ops that move rows and pages between the device pool and host memory.

All work in place on memory that the caller owns and keeps alive until the stream has passed the call, on the
current stream of the pool's device, without an allocation or a synchronisation. `host` and `group_host` are
CPU tensors; with a CUDA pool they must be pinned (or registered), because the GPU's threads read and write
them. Offsets are 64-bit.

Where a layer's row lies:
    device: block * block_stride_bytes + layer_offset[layer] + (row in block) * row_bytes, in the part's block
    host:   host_offset[layer] + (host_block * block_size + row in page) * host_row_stride[layer]
"""

import torch

from vllm_hisparse.ops.checks import ShapeCheck
from vllm_hisparse.ops.load import require_loaded

UINT8, INT16, INT32, INT64 = torch.uint8, torch.int16, torch.int32, torch.int64


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
    skip_io: bool = False,
) -> None:
    """Reads the misses that `resolve` planned into their hot slots, for the layers of one index group.

    group_host     uint8 [host rows, L * row_bytes]  the group's L layers side by side; host memory
    pool           uint8 [pool_bytes]  updated
    layer_offset   int64 [L]  bytes from a block's start to the layer's first row
    layer_part     int32 [L]  engine part that holds the layer
    plan_host_row, plan_slot  int32 [>= R, capacity], plan_count int32 [R], as `resolve` wrote them
    batch          int32 [>= R, 4], as `resolve` had it
    hot            int32 [engine parts, num_regions, max_hot_blocks]

    skip_io moves nothing: the bound that a faster link could reach.
    Raises ValueError on a wrong dtype, shape, device or layout, LibraryError when no library is loaded.
    """
    require_loaded()
    plan = (plan_host_row, plan_slot, plan_count, batch, hot)
    try:
        torch.ops.hisparse.fetch(
            group_host, pool, layer_offset, layer_part, *plan, row_bytes, block_size, block_stride_bytes,
            skip_io,
        )  # fmt: skip
    except RuntimeError:
        check = ShapeCheck("fetch", pool.device)
        check.positive(row_bytes=row_bytes, block_size=block_size, block_stride_bytes=block_stride_bytes)
        _check_fetch(check, group_host, pool, layer_offset, layer_part, plan, row_bytes)
        raise


def fetch_selected(
    group_host: torch.Tensor,
    pool: torch.Tensor,
    layer_offset: torch.Tensor,
    layer_part: torch.Tensor,
    plan_host_row: torch.Tensor,
    plan_slot: torch.Tensor,
    plan_count: torch.Tensor,
    batch: torch.Tensor,
    hot: torch.Tensor,
    topk: torch.Tensor,
    query_start: torch.Tensor,
    resident: torch.Tensor,
    host: torch.Tensor,
    slot_of: torch.Tensor,
    part: int,
    row_bytes: int,
    block_size: int,
    block_stride_bytes: int,
    skip_io: bool = False,
) -> None:
    """`fetch` for the plan of the last `resolve`, given what that was given: the same bytes, sooner.

    A GPU reads rows of this selection while `resolve` still works; which of them to keep, and what else to
    read, is what the plan says. `group_host` .. `hot` as in `fetch`, the others as `resolve` had them. All
    that is read here was final when `resolve` was called, except the plan and `slot_of`:

    topk           int32 [T, K], query_start int32 [batch rows + 1], at most R
    resident       int32 [engine parts, max_requests, max_pages], host int32 [max_requests, max_pages]
    slot_of        int16 [num_regions, max_positions]
    part           the first of `parts`

    Raises as `fetch` does.
    """
    require_loaded()
    plan = (plan_host_row, plan_slot, plan_count, batch, hot)
    sizes = (row_bytes, block_size, block_stride_bytes)
    try:
        torch.ops.hisparse.fetch_selected(
            group_host, pool, layer_offset, layer_part, *plan, topk, query_start, resident, host, slot_of,
            part, *sizes, skip_io,
        )  # fmt: skip
    except RuntimeError:
        check = ShapeCheck("fetch_selected", pool.device)
        check.positive(row_bytes=row_bytes, block_size=block_size, block_stride_bytes=block_stride_bytes)
        check("topk", topk, INT32, ("T", "K"))
        check("query_start", query_start, INT32, (max(query_start.numel(), 1),))
        check("resident", resident, INT32, ("engine_parts", "max_requests", "max_pages"))
        check("host", host, INT32, ("max_requests", "max_pages"))
        check("slot_of", slot_of, INT16, ("num_regions", "max_positions"))
        _check_fetch(check, group_host, pool, layer_offset, layer_part, plan, row_bytes)
        _check_selection(check.extents, query_start.numel() - 1, part, block_size)
        raise


def _check_fetch(
    check: ShapeCheck,
    group_host: torch.Tensor,
    pool: torch.Tensor,
    layer_offset: torch.Tensor,
    layer_part: torch.Tensor,
    plan: tuple[torch.Tensor, ...],
    row_bytes: int,
) -> None:
    plan_host_row, plan_slot, plan_count, batch, hot = plan
    check("pool", pool, UINT8, ("pool_bytes",))
    check("layer_offset", layer_offset, INT64, ("L",))
    check("layer_part", layer_part, INT32, ("L",))
    group_row_bytes = check.extents["L"] * row_bytes
    check("group_host", group_host, UINT8, ("host_rows", group_row_bytes), torch.device("cpu"))
    check("plan_count", plan_count, INT32, ("R",))
    check("plan_host_row", plan_host_row, INT32, ("R+", "capacity"))
    check("plan_slot", plan_slot, INT32, ("R+", "capacity"))
    check("batch", batch, INT32, ("R+", 4))
    check.aligned("batch", batch, 16)
    check("hot", hot, INT32, ("engine_parts", "num_regions", "max_hot_blocks"))


def _check_selection(extents: dict[str, int], num_batch_rows: int, part: int, block_size: int) -> None:
    if num_batch_rows > extents["R"]:
        raise ValueError(
            f"fetch_selected: got {num_batch_rows} batch rows in query_start; need at most {extents['R']} "
            "because plan_count has one number for each"
        )
    if not 0 <= part < extents["engine_parts"]:
        raise ValueError(
            f"fetch_selected: got part {part}; need one below {extents['engine_parts']} because it names a "
            "plane of resident"
        )
    num_positions = extents["max_pages"] * block_size
    if extents["max_positions"] < num_positions:
        raise ValueError(
            f"fetch_selected: got max_positions {extents['max_positions']}; need {num_positions} = max_pages "
            "* block_size because every position that the tables know may be selected"
        )


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
    """Copies whole pages from the device to the host, all layers and pages in one launch.

    pool             uint8 [pool_bytes]
    host             uint8 [host_bytes]  updated; host memory
    page_blocks      int32 [engine parts, n]  device block of each page in each part
    host_blocks      int32 [n]  host block of each page; negative on either side: not moved
    layer_offset     int64 [L], layer_part int32 [L]  as in `fetch`
    host_offset      int64 [L]  bytes from the host memory's start to the layer's row 0
    host_row_stride  int64 [L]  bytes between a layer's rows of consecutive tokens

    Raises ValueError on a wrong dtype, shape, device or layout, LibraryError when no library is loaded.
    """
    sizes = (row_bytes, block_size, block_stride_bytes)
    layers = (layer_offset, layer_part, host_offset, host_row_stride)
    require_loaded()
    try:
        torch.ops.hisparse.write_pages(pool, host, page_blocks, host_blocks, *layers, *sizes)
    except RuntimeError:
        _explain_pages("write_pages", pool, host, page_blocks, host_blocks, layers, sizes)
        raise


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
    """Copies whole pages from the host to the device: `write_pages` the other way round, `pool` updated."""
    sizes = (row_bytes, block_size, block_stride_bytes)
    layers = (layer_offset, layer_part, host_offset, host_row_stride)
    require_loaded()
    try:
        torch.ops.hisparse.read_pages(pool, host, page_blocks, host_blocks, *layers, *sizes)
    except RuntimeError:
        _explain_pages("read_pages", pool, host, page_blocks, host_blocks, layers, sizes)
        raise


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
    """Brings one layer's pages together, from wherever each is, for a prefill that reads them all.

    staging        uint8 [>= n * block_size, row_bytes]  page i goes to rows i * block_size on
    device_blocks  int32 [n]  block of the layer's part, -1: take the page from the host
    host_blocks    int32 [n]  host block; a page that is on neither side leaves its rows alone
    pool, host and the rest as in `write_pages`, with the layer's own offsets and stride

    Raises ValueError on a wrong dtype, shape, device or layout, LibraryError when no library is loaded.
    """
    require_loaded()
    try:
        torch.ops.hisparse.gather_pages(
            pool, host, staging, device_blocks, host_blocks, layer_offset, host_offset, host_row_stride,
            row_bytes, block_size, block_stride_bytes,
        )  # fmt: skip
    except RuntimeError:
        check = ShapeCheck("gather_pages", pool.device)
        check.positive(row_bytes=row_bytes, block_size=block_size, block_stride_bytes=block_stride_bytes)
        check("pool", pool, UINT8, ("pool_bytes",))
        check("host", host, UINT8, ("host_bytes",), torch.device("cpu"))
        check("device_blocks", device_blocks, INT32, ("n",))
        check("host_blocks", host_blocks, INT32, ("n",))
        check.extents["n * block_size"] = check.extents["n"] * block_size
        check("staging", staging, UINT8, ("n * block_size+", row_bytes))
        raise


def _explain_pages(
    op: str,
    pool: torch.Tensor,
    host: torch.Tensor,
    page_blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    layers: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, int],
) -> None:
    check = ShapeCheck(op, pool.device)
    row_bytes, block_size, block_stride_bytes = sizes
    check.positive(row_bytes=row_bytes, block_size=block_size, block_stride_bytes=block_stride_bytes)
    check("pool", pool, UINT8, ("pool_bytes",))
    check("host", host, UINT8, ("host_bytes",), torch.device("cpu"))
    check("host_blocks", host_blocks, INT32, ("n",))
    check("page_blocks", page_blocks, INT32, ("engine_parts", "n"))
    for name, tensor in zip(
        ("layer_offset", "layer_part", "host_offset", "host_row_stride"), layers, strict=True
    ):
        check(name, tensor, INT32 if name == "layer_part" else INT64, ("L",))
