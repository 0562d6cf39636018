"""Resolver and fetch on one GPU, against vLLM's in-tree op and measured floors.

    python examples/bench/resolver.py --out docs/benchmarks/resolver.json --picture
    docs/benchmarks/resolver.svg

k = 2048, hot regions of 4096 rows, 100,352 tokens of context, everything on the host, no speculation. The
peers take part where vllm is importable, or with --vllm-library PATH, its compiled ops. Times are medians of
graph replays with a new selection each, in steady state. The same steps are then run again, and after each
all bytes that the rows name are checked, the peers' too (`exact`), and those that the peers planned to read
(`plan_exact`). The same steps take `floor_resolve_us` in a kernel that only looks up, `floor_us` in one that
also reads what misses.

With --cold nothing but the selection is in the L2 cache when a step begins, for ours, peers, floors and link
alike: so it is in an engine, where a layer's weights have passed through it. Without, whatever the step
before has left there.
"""

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Floors, capture, copy_engine_gbps, environment, median_us, write_json
from contenders import InTree, Ours
from report import draw, print_table
from workload import (
    NUM_TIMED,
    NUM_WARM,
    PAGES,
    SLOTS,
    TOP_K,
    Memory,
    allocate_host,
    host_tables,
    rows_of,
    selections,
)

from vllm_hisparse.ops import Policy, load_library

BATCHES = (1, 8, 32, 64, 128)
MISSES = (0.0, 2.0, 5.0, 13.0)
ROWS = ((656, 1), (1152, 1), (656, 4))  # row bytes, layers side by side
DEFAULT_POLICY = Policy.LRFU


@dataclass
class Bench:
    floors: Floors
    host: torch.Tensor
    pools: list[tuple[float, bool]]  # GiB, in runs
    batches: tuple[int, ...]
    misses: tuple[float, ...]
    peers: bool
    results: list[dict[str, Any]]
    save: Callable[[], None]  # after every batch: a later one may be stopped
    plan_exact: bool = True  # of the last timed peer

    def run(self) -> None:
        for batch in self.batches:
            for miss in self.misses:
                steps = selections(batch, miss, NUM_WARM + NUM_TIMED)
                for policy in Policy:
                    self._ours(steps, miss, policy)
                if self.peers:
                    self._peers(steps, miss)
                del steps
            print_table(self.results, batch)
            self.save()

    def _memory(self, pool: tuple[float, bool], row: tuple[int, int]) -> Memory:
        return Memory(self.host, pool[0], row[0], row[1], pool[1])

    def _ours(self, steps: torch.Tensor, miss: float, policy: Policy) -> None:
        """Every row size and pool for the default policy; for the other one the plainest only."""
        batch = steps.shape[1]
        resolve_us = None
        for pool in self.pools:
            for row in ROWS:
                memory = self._memory(pool, row)
                table = host_tables(batch, memory.num_rows, memory.in_runs)
                ours = Ours(memory, table, policy)
                if resolve_us is None:  # depends on neither
                    resolve_us, _ = self._time(ours, steps, with_io=False)
                self._record("ours", ours, steps, miss, resolve_us, policy=policy.name.lower())
                if policy is not DEFAULT_POLICY:
                    return
                if row[1] > 1 and pool == self.pools[-1]:
                    apart = Ours(memory, table, policy, split=True)
                    self._record(
                        "ours_layer_by_layer", apart, steps, miss, resolve_us, policy=policy.name.lower()
                    )

    def _peers(self, steps: torch.Tensor, miss: float) -> None:
        for impl, union_rows in (("vllm", TOP_K), ("vllm_wide_hash", SLOTS)):
            resolve_us = None
            for pool in self.pools[:2] if impl == "vllm_wide_hash" else self.pools[:1]:
                for row in ROWS:
                    memory = self._memory(pool, row)
                    table = host_tables(steps.shape[1], memory.num_rows, memory.in_runs)
                    peer = InTree(memory, table, union_rows)
                    if resolve_us is None:
                        resolve_us, _ = self._time(peer, steps, with_io=False)
                    self._record(impl, peer, steps, miss, resolve_us, policy="lru")

    def _time(
        self, contender: Ours | InTree, steps: torch.Tensor, with_io: bool
    ) -> tuple[float, bool | None]:
        """Median of the steps after the warm-up, and whether all bytes of them were right."""

        def once() -> None:
            contender.resolve()
            if with_io:
                contender.move()

        def prepare(i: int) -> None:
            contender.topk.copy_(steps[i])

        prepare(0)
        once()
        graph = capture(once)
        contender.reset()
        time_us = median_us(graph.replay, NUM_TIMED, prepare, warmup=NUM_WARM, cold=self.floors.cold)
        expected_misses = steps.shape[1] * int((steps[-1][0] != steps[-2][0]).sum())
        if contender.num_misses() != expected_misses:
            print(f"note: {contender.num_misses()} misses in the last step, {expected_misses} expected")
        if not with_io:
            return time_us, None
        contender.reset()
        exact = torch.ones((), dtype=torch.bool, device="cuda")
        self.plan_exact = True
        for i in range(len(steps)):
            prepare(i)
            graph.replay()
            if i >= NUM_WARM:
                exact &= self._bytes_are_right(contender)
        return time_us, bool(exact)

    def _bytes_are_right(self, contender: Ours | InTree) -> torch.Tensor:
        """Of all rows that the last step named; bool [], on the device."""
        memory = contender.memory
        views = [contender.layer_rows(layer) for layer in range(memory.layers)]
        rows = contender.rows.reshape(-1)
        wanted = rows_of(contender.table, contender.topk).reshape(-1)
        if isinstance(contender, InTree):
            planned, into = contender.planned()
            for layer, view in enumerate(views):
                self.plan_exact &= torch.equal(view[into], memory.expected(planned, layer, False))
        exact = (rows >= 0).all()
        for layer, view in enumerate(views):
            for part in range(0, rows.numel(), 65536):
                got = view[rows[part : part + 65536].clamp(min=0).long()]
                expected = memory.expected(wanted[part : part + 65536], layer, contender.side_by_side)
                exact &= (got == expected).all()
        return exact

    def _record(
        self,
        impl: str,
        contender: Ours | InTree,
        steps: torch.Tensor,
        miss: float,
        resolve_us: float,
        policy: str,
    ) -> None:
        memory = contender.memory
        total_us, exact = self._time(contender, steps, with_io=True)
        moved = contender.num_misses() * memory.group_row_bytes
        result: dict[str, Any] = {
            "impl": impl,
            "policy": policy,
            "batch": steps.shape[1],
            "miss_pct": miss,
            "row_bytes": memory.row_bytes,
            "layers": memory.layers,
            "pool_gib": memory.gib,
            "blocks": "runs" if memory.in_runs else "scattered",
            "resolve_us": round(resolve_us, 2),
            "total_us": round(total_us, 2),
            "bytes": moved,
            "fetch_gbps": round(moved / max(total_us - resolve_us, 1e-9) / 1e3, 2) if moved else None,
            "exact": exact,
            "plan_exact": self.plan_exact if isinstance(contender, InTree) else None,
        }
        if moved and self.floors.available and impl == "ours":
            lists = memory.fresh_rows(contender.table, max(contender.num_misses(), 4096), 12)
            link = self.floors.read_rows_gbps(memory.rows, lists, memory.group_row_bytes)
            result["link_gbps"] = round(link, 2)
            result["over_floor"] = round(total_us / (resolve_us + moved / link / 1e3), 3)
        if self.floors.available and impl == "ours":
            result["floor_resolve_us"] = self._floor_us(contender, steps, reads=0)
            if moved:
                result["floor_us"] = min(self._floor_us(contender, steps, reads) for reads in (1, 2))
        self.results.append(result)

    def _floor_us(self, ours: Ours | InTree, steps: torch.Tensor, reads: int) -> float:
        """`Floors.chain` on the same steps; after each our regions are kept up, untimed, without reads."""
        run = self.floors.chain(ours, reads)
        ours.topk.copy_(steps[0])
        run()
        ours.resolve()
        chain, keep_up = capture(run), capture(ours.resolve)
        ours.reset()

        def prepare(i: int) -> None:
            ours.topk.copy_(steps[i])

        def after(_: int) -> None:
            keep_up.replay()

        return round(median_us(chain.replay, NUM_TIMED, prepare, after, NUM_WARM, self.floors.cold), 2)


def all_resident_us(floors: Floors, host: torch.Tensor, batch: int) -> dict[str, float]:
    """Every page on the device, without and with an idle hot region, beside the plain translation of the
    same."""
    memory = Memory(host, 1.0, 656, 1, False)
    table = host_tables(batch, memory.num_rows, False)
    ours = Ours(memory, table, DEFAULT_POLICY)
    ours.topk.copy_(selections(batch, 0.0, 1)[0])
    ours.resident.copy_(torch.arange(batch * PAGES, device="cuda").view(1, batch, PAGES))
    result = {"batch": batch, "translate_us": floors.translate_us(ours.topk, ours.resident[0], 64)}
    ours.resolve()
    result["with_region_us"] = median_us(capture(ours.resolve).replay, 100, cold=floors.cold)
    ours.batch[:, 1] = -1
    result["resolve_us"] = median_us(capture(ours.resolve).replay, 100, cold=floors.cold)
    return {name: round(value, 2) for name, value in result.items()}


def load_peers(library: Path | None) -> bool:
    if library is not None:
        torch.ops.load_library(str(library))
    elif importlib.util.find_spec("vllm") is not None:
        importlib.import_module("vllm._custom_ops")
    return hasattr(torch.ops._C_cache_ops, "hisparse_resolve_residency")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON of the results")
    parser.add_argument("--picture", type=Path, help="needs matplotlib")
    parser.add_argument("--commit", help="what to record where there is no git")
    parser.add_argument("--pool-gib", type=float, default=32.0, help="the larger of the two host pools")
    parser.add_argument("--vllm-library", type=Path, help="compiled ops of vLLM, where vllm is not installed")
    parser.add_argument("--cold", action="store_true", help="nothing but the selection in the L2 cache")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--miss", type=float, nargs="+", default=MISSES)
    args = parser.parse_args(arguments)

    load_library("cuda")
    peers = load_peers(args.vllm_library)
    floors = Floors(cold=args.cold)
    host = allocate_host(int(args.pool_gib * 2**30))
    result = environment(args.commit) | {"l2_cache": "cold" if args.cold else "warm"}
    result["link_gbps"] = round(copy_engine_gbps(host), 1)
    if floors.available:
        result["empty_graph_us"] = round(floors.empty_graph_us(), 2)
        result["all_resident"] = [all_resident_us(floors, host, batch) for batch in args.batch]
        result["translate_us"] = result["all_resident"][0]["translate_us"]
    result["rows"] = []
    pools = [(1.0, False), (args.pool_gib, False), (args.pool_gib, True)]

    def save() -> None:
        if args.out:
            write_json(args.out, result)

    Bench(floors, host, pools, tuple(args.batch), tuple(args.miss), peers, result["rows"], save).run()
    print({name: value for name, value in result.items() if name != "rows"})
    if args.picture:
        draw(result, args.picture)


if __name__ == "__main__":
    main()
