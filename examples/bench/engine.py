"""Real engines on one GPU, the same model, prompts and KV memory: vLLM, vLLM with its OffloadingConnector,
vLLM's in-tree HiSparse, ours, ours with indexer keys offloaded by an OffloadingConnector beside it
(`ours_keys`), ours without the reads (`skip_io`: wrong outputs, the time that reads add), and ours with every
layer reading its own rows (`by_layer`: `prefetch` off).

    resident   everything fits: what HiSparse costs where it is not needed
    pressure   the KV of a few requests fits
    replayed   the same with selections that churn 13.4 % a step, in place of the random weights' own;
               where every layer runs an indexer with twice the KV memory, so that all requests' keys fit
    long       one context ten times the pool

The first round of the prompts fills the caches; figures are medians of the rounds behind it. A round longer
than `--limit-s` is cut off, its figures are of what it did until then, and `finished` is false. With
`--at-once`, engines of a scenario take turns, round by round; `of_first` is the median of what a round's
figures are of those of the same round of the scenario's first engine, because a machine is faster in one
second than in the next. `decode_tokens_per_s` is of the decode steps alone, for a round begins with the last
tokens of the prompts. Of a decode step, `fast_step_ms` is what a tenth of them stays below, whatever else the
machine does; `cpu_ms` is what the engine's thread computes, `waits` how often it gives up its core,
`graph_ms` what the GPU takes for the forward; `lead_s` is the time until as many decode as ever will.

Models have eight layers of real sizes and random weights: "separate" runs an indexer in every layer, "shared"
one for four.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import environment, write_json
from engine_worker import PATTERNS, Run, make_model
from processes import run_in_turn, run_script

RESIDENT = {"kv_gib": 4.0, "requests": 16, "context": 16384, "num_tokens": 512, "host_gib": 8.0, "rounds": 21}
PRESSURE = {
    "kv_gib": 0.8,
    "requests": 16,
    "context": 65536,
    "num_tokens": 1024,
    "host_gib": 16.0,
    "first_tokens": 32,
    "rounds": 2,
}
SCENARIOS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "resident": (("plain", "ours", "in_tree"), RESIDENT),
    "pressure": (("offload", "ours", "ours_keys", "in_tree"), PRESSURE),
    "replayed": (
        ("ours_skip_io", "ours", "ours_by_layer"),
        PRESSURE | {"churn": 0.134, "num_tokens": 512, "host_gib": 8.0, "rounds": 5},
    ),
    "long": (
        ("ours",),
        {
            "kv_gib": 0.6,
            "requests": 1,
            "context": 1 << 20,
            "num_tokens": 64,
            "host_gib": 12.0,
            "max_batched_tokens": 4096,
        },
    ),
}
OF_MODEL = {("replayed", "separate"): {"kv_gib": 1.6}}  # what else a scenario has for one model
MEASURED = (
    "tokens_per_s", "decode_tokens_per_s", "tpot_ms", "mean_step_ms", "fast_step_ms", "cpu_ms", "graph_ms",
    "waits", "decode_batch", "decode_steps", "preemptions", "hit_rate", "lead_s", "seconds",
)  # fmt: skip
COMPARED = ("tokens_per_s", "decode_tokens_per_s")  # round by round, with the scenario's first engine
COLUMNS = ("model", "scenario", "impl", "batch", "context", *MEASURED[:-1], "of_first", "finished", "start_s")
COLORS = {
    "ours": "#0b6e4f",
    "ours_keys": "#4fa382",
    "in_tree": "#c8553d",
    "plain": "#888888",
    "offload": "#888888",
}


def runs(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Run]]:
    """(scenario, run), in the order in which they are made."""
    for scenario in args.scenarios.split(","):
        impls, options = SCENARIOS[scenario]
        for model in args.models.split(","):
            for impl in impls:
                if args.impls and impl not in args.impls.split(","):
                    continue
                if impl == "ours_by_layer" and "S" not in PATTERNS[model]:
                    continue  # every layer has a selection of its own
                out = str(folder / f"{scenario}-{model}-{impl}.json")
                run = Run(out=out, models=str(folder / "models"), impl=impl, model=model)
                chosen = options | OF_MODEL.get((scenario, model), {})
                yield scenario, replace(run, limit_s=args.limit_s, **chosen)


def _num_identical(result: dict[str, Any], reference: dict[str, Any]) -> int | None:
    """Requests of the last round whose tokens are the reference's. vLLM's top-k kernels leave some to chance:
    `identity.py` compares without it.
    """
    tokens = [r["rounds"][-1]["tokens"] if "rounds" in r else [] for r in (result, reference)]
    return sum(a == b for a, b in zip(*tokens, strict=True)) if tokens[0] and tokens[1] else None


def _of_first(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, float] | None:
    """What the rounds behind the first are of the reference's, a median each."""
    pairs = list(zip(result["rounds"][1:], reference.get("rounds", [])[1:], strict=False))
    if not pairs or not all(r[key] for pair in pairs for r in pair for key in COMPARED):
        return None
    return {key: round(median(ours[key] / theirs[key] for ours, theirs in pairs), 4) for key in COMPARED}


def row_of(scenario: str, run: Run, result: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Medians of the rounds behind the first, or of the only one; `reference`: of the scenario's first
    engine.
    """
    if "error" in result:
        return {"impl": run.impl, "model": run.model, "scenario": scenario, "error": result["error"]}
    rounds = result["rounds"][1:] or result["rounds"]
    figures = {key: [r[key] for r in rounds if r[key] is not None] for key in MEASURED}
    return {
        "impl": run.impl,
        "model": run.model,
        "scenario": scenario,
        "batch": run.requests,
        "context": run.context,
        "kv_gib": run.kv_gib,
        **{key: round(median(values), 4) if values else None for key, values in figures.items()},
        "of_first": _of_first(result, reference),
        "identical": _num_identical(result, reference),
        "finished": all(r["finished"] for r in result["rounds"]),
        "num_rounds": len(rounds),
        "start_s": result["start_s"],
        "pages": result.get("pages"),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Output tokens a second, a panel a scenario and model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(
        dict.fromkeys((r["scenario"], r["model"]) for r in rows if r["scenario"] in ("resident", "pressure"))
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 3), squeeze=False)
    for axis, (scenario, model) in zip(axes[0], panels, strict=True):
        chosen = [r for r in rows if (r["scenario"], r["model"]) == (scenario, model)]
        impls = [r["impl"] for r in chosen]
        bars = axis.bar(impls, [r["tokens_per_s"] for r in chosen], color=[COLORS[i] for i in impls])
        axis.bar_label(bars, fmt="%.0f")
        axis.set_title(f"{scenario}, {model}", fontsize=9)
    axes[0][0].set_ylabel("output tokens a second")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenarios", default="resident,pressure,replayed")
    parser.add_argument("--models", default="shared,separate")
    parser.add_argument("--impls", default="", help="these only")
    parser.add_argument("--at-once", type=int, default=1, help="engines that start side by side")
    parser.add_argument("--limit-s", type=float, default=120, help="of a round")
    parser.add_argument("--timeout-s", type=float, default=600, help="of one engine, its turn waited for")
    parser.add_argument("--folder", type=Path, help="of models, results and logs")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    planned = list(runs(args, folder))
    for model in {run.model for _, run in planned}:  # once, before several engines want it
        make_model(replace(planned[0][1], model=model))
    rows = []
    print(" ".join(f"{name:>13}" for name in COLUMNS))
    keyed = [((scenario, run.model), run) for scenario, run in planned]
    results = run_in_turn(keyed, args.at_once, args.timeout_s)
    references: dict[tuple[str, str], dict[str, Any]] = {}
    for (scenario, run), result in zip(planned, results, strict=True):
        row = row_of(scenario, run, result, references.setdefault((scenario, run.model), result))
        rows.append(row)
        print(row.get("error", " ".join(f"{row.get(name)!s:>13}" for name in COLUMNS)), flush=True)
        if args.out:  # after each: a later one may be stopped
            head = environment(args.commit) | {"command": "vllm-hisparse bench engine"}
            write_json(args.out, head | {"rows": rows})
    if args.picture:
        draw([r for r in rows if "error" not in r], args.picture)


if __name__ == "__main__":
    run_script(main)
