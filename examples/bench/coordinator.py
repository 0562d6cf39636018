"""What HiSparse's scheduler side costs a decode step, measured inside vLLM's own scheduler, GLM-5.2's groups.

Every request decodes. In some steps nothing changes; in others eight requests open a page, eight sealed pages
go to the host and eight earlier copies are acknowledged. "full": all pages are on the device, between the
watermarks. "mixed": all prompts are on the host only, every request holds a hot region, and the pool is below
the low watermark, so that every step would like to reclaim something.

    us_per_step     what HiSparse adds: us_plan, us_acknowledge, and what us_slots takes beyond us_vllm_slots
    us_plan         build_connector_meta: residency policy, message, encoding
    us_acknowledge  update_connector_output and metrics
    us_slots        allocate_slots for every request: KVCacheManager and our managers
    us_vllm_slots   the same in vLLM without HiSparse, which has one KV group
    us_whole, us_vllm_whole     all of schedule() and update_from_output(), with HiSparse and without
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import write_json
from coordinator_report import draw, print_table

from vllm_hisparse.connector import HiSparseWorkerMetadata
from vllm_hisparse.messages import Acknowledgement, Progress, decode
from vllm_hisparse.scheduler import pressure
from vllm_hisparse.simulation.engine import EngineSize, SchedulerSide
from vllm_hisparse.simulation.model import GLM_5_2, PAGE_TOKENS

CHANGED = 8  # pages that a step with changes opens
SETTLED = 4  # steps without a change before one counts as unchanged
NUM_REPLAYS = 5  # of a step's allocations
MAX_PARTS = 6  # of a page of GLM-5.2
UNLIMITED = 1 << 60


class Clock:
    """Nanoseconds inside wrapped functions since the last `take`."""

    def __init__(self, owner: Any, *names: str) -> None:
        self._ns = 0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        now = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                self._ns += now() - start

        return timed

    def take(self) -> int:
        ns, self._ns = self._ns, 0
        return ns


class Bench:
    """One engine full of decoding requests. `residency`: "full", "mixed", or "vllm" without HiSparse."""

    def __init__(self, num_requests: int, context: int, residency: str) -> None:
        self.num_requests, self.context, self.residency = num_requests, context, residency
        self.has_hisparse = residency != "vllm"
        self.side = _engine(num_requests, context, self.has_hisparse)
        self.payload, self._ack = b"", None
        self._clocks: dict[str, Clock] = {}
        self._fill()
        # As vLLM's engine core does, or a collection would now and then look at every block.
        gc.collect()
        gc.freeze()

    # ---- set-up

    def _fill(self) -> None:
        for index in range(self.num_requests):
            # Eight requests at a time reach the end of a page, in the first steps of every 64.
            length = self.context - 1 - index // CHANGED
            self.side.add(f"r{index}", [index] * length, max_tokens=4096)
        spilled, pressure.MAX_SPILLED_PAGES = pressure.MAX_SPILLED_PAGES, UNLIMITED
        if self.has_hisparse:
            self._set_watermarks(0, UNLIMITED)
        for _ in range(SETTLED):
            self._step()
        if self.residency == "mixed":
            self._evict()
        pressure.MAX_SPILLED_PAGES = spilled

    def _set_watermarks(self, low: int, high: int) -> None:
        policy = self.side.coordinator.pressure
        policy.low, policy.high, policy._copy_below = low, high, high

    def _evict(self) -> None:
        """Push every sealed page off the device, and leave the pool below the low watermark."""
        self._set_watermarks(UNLIMITED, UNLIMITED)
        self._step()
        pool = self.side.coordinator.pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        pool.free_blocks(blocks[: 32 * MAX_PARTS * self.num_requests])
        self._step()

    # ---- steps

    def _step(self) -> tuple[int, Any]:
        """One step of the scheduler. Returns its nanoseconds and its output."""
        start = time.perf_counter_ns()
        output = self.side.scheduler.schedule()
        scheduled = time.perf_counter_ns()
        result = self.side.result(output, self._ack)
        self._answer(output)
        processing = time.perf_counter_ns()
        self.side.scheduler.update_from_output(output, result)
        return scheduled - start + time.perf_counter_ns() - processing, output

    def _answer(self, output: Any) -> None:
        """The workers' acknowledgement of a step's copies, to be processed a step later."""
        if not self.has_hisparse:
            return
        self.payload = output.kv_connector_metadata.payload
        transfer_id = decode(self.payload).transfer_id
        done = Acknowledgement({0: Progress(transfer_id, transfer_id)})
        self._ack = HiSparseWorkerMetadata(done) if transfer_id >= 0 else None

    def _steps(self, num_cycles: int) -> Iterator[tuple[int, int]]:
        """(changed pages, nanoseconds) of the steps that changed none or eight, and nothing around them."""
        quiet = 0
        for _ in range(num_cycles * PAGE_TOKENS):
            for clock in self._clocks.values():
                clock.take()
            ns, output = self._step()
            opened = sum(blocks is not None for blocks in output.scheduled_cached_reqs.new_block_ids)
            quiet = 0 if opened or self.payload else quiet + 1
            if opened == CHANGED and (not self.has_hisparse or len(decode(self.payload).spill) == CHANGED):
                yield CHANGED, ns
            elif quiet >= SETTLED:
                yield 0, ns

    # ---- measuring

    def measure(self, num_cycles: int) -> dict[int, dict[str, float]]:
        """Medians by number of changed pages and name: microseconds, and the bytes of a message."""
        values: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in (0, CHANGED)}
        for _ in self._steps(1):
            pass
        for changed, ns in self._steps(num_cycles):
            values[changed]["whole"].append(ns / 1e3)
            values[changed]["message_bytes"].append(len(self.payload))
        connector, manager = self.side.scheduler.connector, self.side.scheduler.kv_cache_manager
        allocate = manager.allocate_slots
        self._clocks["clocked_slots"] = Clock(manager, "allocate_slots")
        if self.has_hisparse:
            self._clocks["plan"] = Clock(connector, "build_connector_meta")
            self._clocks["acknowledge"] = Clock(
                connector, "update_connector_output", "get_kv_connector_stats"
            )
        for changed, _ in self._steps(num_cycles):
            for name, clock in self._clocks.items():
                values[changed][name].append(clock.take() / 1e3)
            if not changed:
                values[0]["slots"] += [self._replay(allocate) for _ in range(NUM_REPLAYS)]
        manager.allocate_slots = allocate
        result = {n: {k: statistics.median(v) for k, v in d.items()} for n, d in values.items() if d}
        if CHANGED in result:
            # The clock's own time is in both.
            change = result[CHANGED]["clocked_slots"] - result[0]["clocked_slots"]
            result[CHANGED]["slots"] = result[0]["slots"] + change
        return result

    def _replay(self, allocate: Any) -> float:
        """Microseconds for the coming step's allocations, of requests that need no block for it."""
        running = [
            r
            for r in self.side.scheduler.running
            if 1 < r.num_computed_tokens % PAGE_TOKENS < PAGE_TOKENS - 2
        ]
        start = time.perf_counter_ns()
        for request in running:
            allocate(request, 1, num_lookahead_tokens=0)
        return (time.perf_counter_ns() - start) / 1e3 * self.num_requests / max(len(running), 1)

    def close(self) -> None:
        """Let the engine be collected."""
        del self.side
        gc.unfreeze()
        gc.collect()


def _engine(num_requests: int, context: int, hisparse: bool) -> SchedulerSide:
    num_pages = num_requests * (context // PAGE_TOKENS + 80)
    num_blocks = MAX_PARTS * (num_pages + 130 * num_requests) + num_pages if hisparse else num_pages
    page_bytes = GLM_5_2.token_bytes * PAGE_TOKENS
    size = EngineSize(
        device_gib=num_blocks * page_bytes / 2**30,
        host_gib=(num_pages + 4096) * page_bytes / 2**30,
        max_requests=num_requests,
        max_model_len=context + 8192,
        max_step_tokens=num_requests * context,
        num_device_blocks=num_blocks,
    )
    return SchedulerSide(size, hisparse)


def measure_rows(
    num_requests: int, context: int, residencies: list[str], cycles: int
) -> Iterator[dict[str, Any]]:
    """Rows of one number of requests and one context."""
    theirs: dict[int, dict[str, float]] = {}
    for residency in ("vllm", *residencies):
        bench = Bench(num_requests, context, residency)
        found = bench.measure(cycles)
        bench.close()
        if residency == "vllm":
            theirs = found
            continue
        for changed, us in found.items():
            added = us["plan"] + us["acknowledge"] + max(us["slots"] - theirs[changed]["slots"], 0.0)
            parts = {
                "us_per_step": added,
                "us_plan": us["plan"],
                "us_acknowledge": us["acknowledge"],
                "us_slots": us["slots"],
                "us_vllm_slots": theirs[changed]["slots"],
                "us_whole": us["whole"],
                "us_vllm_whole": theirs[changed]["whole"],
            }
            yield {
                "requests": num_requests,
                "context": context,
                "residency": residency,
                "changed_pages": changed,
                "message_bytes": int(us["message_bytes"]),
                **{name: round(value, 1) for name, value in parts.items()},
            }


def environment(commit: str | None) -> dict[str, Any]:
    """`cpu`, `commit` and `versions`."""
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    found = (
        commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    )
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    versions = {name: version(name) for name in ("vllm", "torch", "msgspec")}
    return {
        "cpu": f"{names[0] if names else platform.machine()}, {len(names)} cores",
        "commit": found,
        "versions": versions | {"python": platform.python_version()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--residency", nargs="+", default=["full", "mixed"], choices=["full", "mixed"])
    parser.add_argument("--cycles", type=int, default=6, help="of 64 steps each, for each kind of figure")
    parser.add_argument("--commit", help="what the result is of; the checkout's by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = []
    for num_requests in args.requests:
        for context in args.contexts:
            rows += measure_rows(num_requests, context, args.residency, args.cycles)
    print_table(rows)
    result = {"command": "vllm-hisparse bench coordinator", **environment(args.commit), "rows": rows}
    if args.json:
        write_json(args.json, result)
    if args.plot:
        draw(result, args.plot)


if __name__ == "__main__":
    main()
