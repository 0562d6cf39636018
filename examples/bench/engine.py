"""Real engines on one GPU, the same model, prompts and KV memory: vLLM, vLLM with its OffloadingConnector,
vLLM's
in-tree HiSparse, ours, and ours without the reads (`skip_io`: wrong outputs, the time that reads add).

    resident   everything fits: what HiSparse costs where it is not needed
    pressure   the KV of a few requests fits; second round of the same prompts
    replayed   the same with selections that churn 13.4 % a step, in place of the random weights' own
    long       one context ten times the pool

Models have eight layers of real sizes and random weights: "separate" runs an indexer in every layer, "shared"
one for four.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import environment, write_json
from engine_worker import Run
from processes import run_engine

RESIDENT = {"kv_gib": 4.0, "requests": 16, "context": 16384, "num_tokens": 512, "host_gib": 8.0}
PRESSURE = {
    "kv_gib": 0.8,
    "requests": 16,
    "context": 65536,
    "num_tokens": 1024,
    "host_gib": 16.0,
    "rounds": 2,
}
SCENARIOS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "resident": (("plain", "ours", "in_tree"), RESIDENT),
    "pressure": (("offload", "ours", "in_tree"), PRESSURE),
    "replayed": (("ours_skip_io", "ours"), PRESSURE | {"churn": 0.134, "num_tokens": 512}),
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
MEASURED = (
    "tokens_per_s", "tpot_ms", "mean_step_ms", "decode_batch", "decode_steps", "preemptions", "hit_rate",
    "seconds",
)  # fmt: skip
COLUMNS = ("model", "scenario", "impl", "batch", "context", *MEASURED[:-1], "start_s")
COLORS = {"ours": "#0b6e4f", "in_tree": "#c8553d", "plain": "#888888", "offload": "#888888"}


def runs(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Run]]:
    """(scenario, run), in the order in which they are made."""
    for scenario in args.scenarios.split(","):
        impls, options = SCENARIOS[scenario]
        for model in args.models.split(","):
            for impl in impls:
                if args.impls and impl not in args.impls.split(","):
                    continue
                out = str(folder / f"{scenario}-{model}-{impl}.json")
                run = Run(out=out, models=str(folder / "models"), impl=impl, model=model)
                yield scenario, replace(run, **options)


def row_of(scenario: str, run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """The last round's figures."""
    last = result["rounds"][-1]
    return {
        "impl": run.impl,
        "model": run.model,
        "scenario": scenario,
        "batch": run.requests,
        "context": run.context,
        "kv_gib": run.kv_gib,
        **{key: last[key] for key in MEASURED},
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
    parser.add_argument("--timeout-s", type=float, default=300, help="of one engine")
    parser.add_argument("--folder", type=Path, help="of models, results and logs")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    print(" ".join(f"{name:>13}" for name in COLUMNS))
    for scenario, run in runs(args, folder):
        try:
            row = row_of(scenario, run, run_engine(run, args.timeout_s))
        except RuntimeError as error:
            print(error)
            row = {
                "impl": run.impl,
                "model": run.model,
                "scenario": scenario,
                "error": str(error).splitlines()[-1],
            }
        rows.append(row)
        print(" ".join(f"{row.get(name)!s:>13}" for name in COLUMNS), flush=True)
        if args.out:  # after each: a later one may be stopped
            head = environment(args.commit) | {"command": "vllm-hisparse bench engine"}
            write_json(args.out, head | {"rows": rows})
    if args.picture:
        draw([r for r in rows if "error" not in r], args.picture)


if __name__ == "__main__":
    main()
