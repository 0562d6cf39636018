"""A table on the terminal and a picture of coordinator results."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "requests", "context", "residency", "changed_pages", "message_bytes", "us_per_step", "us_plan",
    "us_acknowledge", "us_slots", "us_vllm_slots", "us_whole", "us_vllm_whole",
)  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Scheduler side of a decode step, median µs")
    for name in COLUMNS:
        table.add_column(name.removeprefix("us_").replace("_", "\n"), justify="right")
    for row in rows:
        table.add_row(*(f"{row[name]}" for name in COLUMNS))
    Console(width=120).print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """What HiSparse adds, and whole steps with it and without, by number of requests, longest context."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    longest = max(row["context"] for row in result["rows"])
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True)
    for changed, colour in ((0, "#0b6e4f"), (8, "#c8553d")):
        rows = [r for r in result["rows"] if r["context"] == longest and r["changed_pages"] == changed]
        for residency, line in (("full", "-"), ("mixed", "--")):
            chosen = [r for r in rows if r["residency"] == residency]
            requests = [r["requests"] for r in chosen]
            label = f"{residency}, {changed} pages a step"
            axes[0].plot(
                requests, [r["us_per_step"] for r in chosen], line, color=colour, marker=".", label=label
            )
            axes[1].plot(
                requests, [r["us_whole"] for r in chosen], line, color=colour, marker=".", label=label
            )
        theirs = sorted({(r["requests"], r["us_vllm_whole"]) for r in rows})
        axes[1].plot(
            *zip(*theirs, strict=True),
            ":",
            color=colour,
            marker=".",
            label=f"vLLM alone, {changed} pages a step",
        )
    for axis, title in zip(axes, ("added by HiSparse", "schedule() and update_from_output()"), strict=True):
        axis.set(title=title, xlabel="requests", xscale="log", yscale="log")
        axis.set_xticks(sorted({row["requests"] for row in result["rows"]}))
        axis.get_xaxis().set_major_formatter(mpl.ticker.ScalarFormatter())
        axis.get_xaxis().set_minor_formatter(mpl.ticker.NullFormatter())
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("µs a step")
    figure.suptitle(f"{longest // 1024}K tokens a request, GLM-5.2's groups, {result['cpu']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
