"""Write-back, restore and prefill staging of whole pages: GB/s over the link, one launch a step.

python examples/bench/pages.py --out docs/benchmarks/pages.json
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import capture, copy_engine_gbps, environment, median_us, write_json
from workload import BLOCK_SIZE, allocate_host

from vllm_hisparse.ops import load_library

# layers, layers of an index group, row bytes, pages a step
CASES = (
    (60, 4, 656, 4),
    (60, 4, 656, 32),
    (60, 1, 656, 4),
    (60, 1, 656, 32),
    (60, 1, 1152, 4),
    (60, 1, 1152, 32),
    (60, 4, 1152, 32),
    (4, 4, 656, 1),
)
ops = torch.ops.hisparse


def measure(host: torch.Tensor, layers: int, group: int, row_bytes: int, pages: int) -> dict[str, Any]:
    page_bytes = BLOCK_SIZE * row_bytes
    stride = layers * page_bytes
    host_blocks = host.numel() // stride
    pool = torch.randint(0, 256, (2 * pages * stride,), dtype=torch.uint8, device="cuda")
    layer = torch.arange(layers, device="cuda")
    offset, part = layer * page_bytes, torch.zeros(layers, dtype=torch.int32, device="cuda")
    host_offset = layer // group * group * page_bytes * host_blocks + layer % group * row_bytes
    host_stride = torch.full((layers,), group * row_bytes, device="cuda")
    blocks = torch.randperm(2 * pages, device="cuda")[:pages].view(1, pages).int()
    host_chosen = torch.randperm(host_blocks, device="cuda")[:pages].int()
    arguments = (
        pool,
        host,
        blocks,
        host_chosen,
        offset,
        part,
        host_offset,
        host_stride,
        row_bytes,
        BLOCK_SIZE,
        stride,
    )
    before = pool.clone()

    def write() -> None:
        ops.write_pages(*arguments)

    def read() -> None:
        ops.read_pages(*arguments)

    write()
    write_us = median_us(capture(write).replay, 20)
    for block in blocks[0].tolist():
        pool[block * stride : (block + 1) * stride].zero_()
    read()
    exact = torch.equal(pool, before)
    read_us = median_us(capture(read).replay, 20)
    moved = pages * stride
    return {
        "layers": layers, "group": group, "row_bytes": row_bytes, "pages": pages, "bytes": moved,
        "exact": exact,
        "write_us": round(write_us, 1), "write_gbps": round(moved / write_us / 1e3, 2),
        "read_us": round(read_us, 1), "read_gbps": round(moved / read_us / 1e3, 2),
    }  # fmt: skip


def measure_gather(
    host: torch.Tensor, row_bytes: int, group: int, pages: int, on_device: bool
) -> dict[str, Any]:
    page_bytes = BLOCK_SIZE * row_bytes
    host_blocks = host.numel() // (page_bytes * group)
    pool = torch.randint(0, 256, (2 * pages * page_bytes,), dtype=torch.uint8, device="cuda")
    staging = torch.empty(pages * BLOCK_SIZE, row_bytes, dtype=torch.uint8, device="cuda")
    device_blocks = torch.full((pages,), -1, dtype=torch.int32, device="cuda")
    if on_device:
        device_blocks.copy_(torch.randperm(2 * pages, device="cuda")[:pages])
    chosen = torch.randperm(host_blocks, device="cuda")[:pages].int()

    def gather() -> None:
        tail = (0, 0, group * row_bytes, row_bytes, BLOCK_SIZE, page_bytes)
        ops.gather_pages(pool, host, staging, device_blocks, chosen, *tail)

    gather()
    gather_us = median_us(capture(gather).replay, 20)
    moved = pages * page_bytes
    return {"op": "gather", "group": group, "row_bytes": row_bytes, "pages": pages, "on_device": on_device,
            "gather_us": round(gather_us, 1), "gather_gbps": round(moved / gather_us / 1e3, 2)}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--pool-gib", type=float, default=16.0)
    args = parser.parse_args(arguments)
    load_library("cuda")
    host = allocate_host(int(args.pool_gib * 2**30))
    result = environment(args.commit)
    result["h2d_gbps"] = round(copy_engine_gbps(host), 1)
    result["d2h_gbps"] = round(copy_engine_gbps(host, to_device=False), 1)
    result["rows"] = [measure(host, *case) for case in CASES]
    result["rows"] += [
        measure_gather(host, row_bytes, group, 512, on_device)
        for row_bytes, group in ((656, 1), (656, 4), (1152, 1))
        for on_device in (False, True)
    ]
    for row in result["rows"]:
        print(row)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
