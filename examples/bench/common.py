"""What the benchmarks share: timing of graph replays, floors measured in the same run, and the JSON around
results."""

import ctypes
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HIDE_CYCLES = (
    150_000  # keeps the device busy while the host enqueues an interval, so that only the device is timed
)


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`run` as a graph. It must have run once before, for anything that initialises on first use."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize()
    return graph


def median_us(
    run: Callable[[], None],
    num_replays: int,
    prepare: Callable[[int], None] | None = None,
    after: Callable[[int], None] | None = None,
    warmup: int = 3,
    cold: bool = False,
) -> float:
    """Median device time of `run` (a graph's replay), each replay between two events of its own.

    `prepare(i)` sets the inputs of replay i and `after(i)` follows it, both outside the interval. The first
    `warmup` replays are not counted. `cold`: nothing but the inputs is in the L2 cache.
    """
    times = []
    for i in range(warmup + num_replays):
        if cold:
            evict()
        if prepare:
            prepare(i)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HIDE_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= warmup:
            times.append(begin.elapsed_time(end) * 1e3)
        if after:
            after(i)
    return statistics.median(times)


def evict() -> None:
    """Leave nothing of what was there in the L2 cache, by reading as an engine reads its weights between two
    layers. Translations of host addresses are looked up through that cache, too.
    """
    _filler().sum()


@cache
def _filler() -> torch.Tensor:
    """float32, twice what the L2 cache holds."""
    return torch.zeros(torch.cuda.get_device_properties().L2_cache_size // 2, device="cuda")


class Floors:
    """floors.cu, compiled with the machine's nvcc. `available` is False where there is none."""

    def __init__(self, library: Path | None = None, cold: bool = False) -> None:
        """`cold`: see `median_us`."""
        self.cold = cold
        self._library: Any = None
        if library is None and shutil.which("nvcc"):
            library = Path(tempfile.mkdtemp()) / "floors.so"
            source = Path(__file__).with_name("floors.cu")
            major, minor = torch.cuda.get_device_capability()
            command = ["nvcc", "-O3", "-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}"]
            subprocess.run([*command, str(source), "-o", str(library)], check=True)
        if library is not None:
            self._library = ctypes.CDLL(str(library))

    @property
    def available(self) -> bool:
        return self._library is not None

    def empty_graph_us(self, num_replays: int = 200) -> float:
        def run() -> None:
            self._library.run_empty(_stream())

        run()
        return median_us(capture(run).replay, num_replays)

    def translate_us(
        self, topk: torch.Tensor, table: torch.Tensor, block_size: int, num_replays: int = 100
    ) -> float:
        """A block-table translation of topk [batch, k] by table [batch, pages] and nothing else."""
        rows = torch.empty_like(topk)
        sizes = (topk.shape[0], topk.shape[1], table.shape[1], block_size.bit_length() - 1)

        def run() -> None:
            self._library.run_translate(_pointer(topk), _pointer(table), _pointer(rows), *sizes, _stream())

        run()
        return median_us(capture(run).replay, num_replays, cold=self.cold)

    def chain(self, ours: Any, reads: int) -> Callable[[], None]:
        """What no resolver can do without, on the tensors of `contenders.Ours`; `reads` as in floors.cu."""
        memory, topk = ours.memory, ours.topk
        row_bytes = memory.group_row_bytes
        rows = torch.empty_like(topk)
        out = torch.empty(topk.numel() * row_bytes if reads else 16, dtype=torch.uint8, device="cuda")
        tensors = (
            topk, ours.batch, ours.resident, ours.table, ours.slot_of, ours.hot, rows,
            memory.rows, out,
        )  # fmt: skip
        pages, positions = ours.table.shape[1], ours.slot_of.shape[1]
        block_shift = (positions // pages).bit_length() - 1
        sizes = (*topk.shape, pages, positions, ours.hot.shape[2], block_shift, row_bytes)

        def run() -> None:
            self._library.run_chain(reads, *map(_pointer, tensors), *sizes, _stream())

        return run

    def read_rows_gbps(self, host: torch.Tensor, lists: list[torch.Tensor], row_bytes: int) -> float:
        """The best rate, over grid sizes, at which threads read rows of pinned `host` and do nothing else.

        `lists`: int32 row numbers for one launch each. Every launch needs rows of its own, since the
        device keeps host
        memory that it has read, and its translations, for a while.
        """
        grids = (16, 32, 64)
        out = torch.empty(lists[0].numel() * row_bytes, dtype=torch.uint8, device="cuda")
        rates = []
        for n, ctas in enumerate(grids):
            turns = iter(lists[n :: len(grids)])

            def run(ctas: int = ctas, turns: Iterator[torch.Tensor] = turns) -> None:
                rows = next(turns)
                sizes = (rows.numel(), row_bytes, ctas)
                self._library.run_read_rows(_pointer(host), _pointer(out), _pointer(rows), *sizes, _stream())

            num_replays = len(lists[n :: len(grids)]) - 1
            us = median_us(run, num_replays, warmup=1, cold=self.cold)
            rates.append(out.numel() / us / 1e3)
        return max(rates)


def copy_engine_gbps(host: torch.Tensor, to_device: bool = True) -> float:
    """The copy engine over at most 1 GiB of pinned `host`."""
    source = host[: 2**30]
    device = torch.empty_like(source, device="cuda")
    run = (
        (lambda: device.copy_(source, non_blocking=True))
        if to_device
        else (lambda: source.copy_(device, True))
    )
    return source.numel() / median_us(run, 5, warmup=1) / 1e3


def environment(commit: str | None) -> dict[str, Any]:
    """`gpu`, `commit` and `versions` of a result file."""
    if commit is None:
        git = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = git.stdout.strip() or "unknown"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    if find_spec("vllm"):
        versions["vllm"] = version("vllm")
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    if shutil.which(driver[0]):
        versions["driver"] = subprocess.run(
            driver, capture_output=True, text=True, check=False
        ).stdout.strip()
    return {"gpu": torch.cuda.get_device_name(), "commit": commit, "versions": versions}


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Rows of a result on a line each, so that a diff shows which changed."""
    rows = result.get("rows", [])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(head[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
