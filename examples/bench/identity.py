"""Outputs of real engines on CUDA under pressure against full residency, bit by bit.

Every case runs vLLM without HiSparse and enough memory, and HiSparse with too little, on the same prompts;
both are made comparable as `testing/determinism.py` says. Tokens and log-probabilities
have to be equal wherever both engines scheduled the same steps: `same_schedule` says so, a round each. (In
other steps, batch sizes differ, and with them the order in which vLLM's matrix products add.)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import environment, write_json
from engine_worker import Run, make_model
from processes import run_engines, run_script

PRESSURE: dict[str, Any] = {"kv_gib": 0.3, "low": 0.5, "high": 0.7}


@dataclass(frozen=True)
class Case:
    """A shape of engine, and how HiSparse's differs from the reference."""

    name: str
    both: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=lambda: PRESSURE)

    @property
    def num_gpus(self) -> int:
        return int(self.both.get("ranks", 1))


CASES = (
    Case("full and piecewise graphs"),
    Case("eager", both={"eager": True}),
    Case("full decode graphs", both={"cudagraph_mode": "FULL_DECODE_ONLY"}),
    Case("piecewise graphs", both={"cudagraph_mode": "PIECEWISE"}),
    Case("all resident", ours={}),
    Case("vLLM twice", ours={"impl": "plain"}),  # what is left of chance
    Case("always from the host", ours={"always_host": True}),
    Case("shared selections", both={"model": "shared"}),
    Case("shared, layer by layer", both={"model": "shared"}, ours=PRESSURE | {"impl": "ours_by_layer"}),
    Case("two ranks", both={"ranks": 2}),  # on two GPUs
    Case("bf16 rows", both={"kv_cache_dtype": "auto"}, ours=PRESSURE | {"kv_gib": 0.5}),
    Case("three drafts", both={"draft_tokens": 3}, ours=PRESSURE | {"kv_gib": 0.4}),
    Case(
        "a context ten times the pool",
        both={"requests": 1, "context": 131072, "max_batched_tokens": 1024, "rounds": 1},
        ours={"kv_gib": 0.25, "low": 0.3, "high": 0.5},
    ),
    Case(
        "chunks over host-backed context",
        both={"requests": 1, "context": 40000, "max_batched_tokens": 1024},
        ours={"kv_gib": 0.2, "low": 0.3, "high": 0.5},
    ),
)


def reference_of(case: Case, models: str, out: Path) -> Run:
    base = Run(
        out="",
        models=models,
        requests=6,
        context=12000,
        num_tokens=48,
        max_batched_tokens=2048,
        rounds=2,
        exact=True,
        indexer_pages=1,
        host_gib=4.0,
    )
    slug = "-".join(f"{k}={v}" for k, v in sorted(case.both.items())) or "plain"
    return replace(base, impl="plain", out=str(out / f"ref-{slug}.json"), **case.both)


def compare(reference: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Counts over all requests, a list entry a round."""
    row: dict[str, Any] = {
        "same_schedule": [],
        "requests": 0,
        "same_tokens": [],
        "same_logprobs": [],
        "first_difference": [],
    }
    for a, b in zip(reference["rounds"], ours["rounds"], strict=True):
        pairs = list(zip(a["outputs"], b["outputs"], strict=True))
        row["requests"] = len(pairs)
        row["same_schedule"].append(a["schedule"] == b["schedule"])
        row["same_tokens"].append(sum(x[0] == y[0] for x, y in pairs))
        row["same_logprobs"].append(sum(x[1] == y[1] for x, y in pairs))
        row["first_difference"].append(
            [
                next((i for i, (p, q) in enumerate(zip(x[1], y[1], strict=True)) if p != q), None)
                for x, y in pairs
            ]
        )
    row["preemptions"] = [r["preemptions"] for r in ours["rounds"]]
    row["distinct_tokens"] = [r["distinct"] for r in ours["rounds"]]
    if "counters" in ours:  # not vLLM alone
        row |= {key: ours["counters"][key] for key in ("resident", "hits", "misses", "unreadable")}
        row |= {key: ours["pages"][key] for key in ("spilled", "restored", "unpinned", "lost", "host_hits")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--only", default="", help="cases whose names contain one of these, by commas")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--folder", type=Path, default=None, help="of models, results and logs")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    wanted = args.only.split(",")
    asked_for = [case for case in CASES if any(part in case.name for part in wanted)]
    cases = [case for case in asked_for if case.num_gpus <= torch.cuda.device_count()]
    for name in [case.name for case in asked_for if case not in cases]:
        print(f"{name}: not run, there are not enough GPUs", flush=True)
    references = {reference_of(case, str(folder / "models"), folder) for case in cases}
    runs = {run.out: run for run in references}
    for case in cases:
        base = reference_of(case, str(folder / "models"), folder)
        out = str(folder / (case.name.replace(" ", "-") + ".json"))
        runs[out] = replace(base, **{"impl": "ours", **case.ours, "out": out})
    for model in {run.model for run in runs.values()}:  # once, before several engines want it
        make_model(replace(next(iter(references)), model=model))
    results = dict(zip(runs, run_engines(list(runs.values()), args.at_once, args.timeout_s), strict=True))
    rows = []
    for case in cases:
        reference = results[reference_of(case, str(folder / "models"), folder).out]
        ours = results[str(folder / (case.name.replace(" ", "-") + ".json"))]
        failed = reference.get("error") or ours.get("error")
        row = {"case": case.name} | ({"error": failed} if failed else compare(reference, ours))
        rows.append(row)
        print(row["error"] if failed else row, flush=True)
    if args.out:
        write_json(
            args.out, environment(args.commit) | {"command": "vllm-hisparse bench identity", "rows": rows}
        )
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    run_script(main)
