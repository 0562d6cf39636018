"""A table on the terminal and a picture of resolver results."""

from pathlib import Path
from typing import Any

COLUMNS = (
    ("impl", 20), ("policy", 6), ("batch", 5), ("miss_pct", 8), ("row_bytes", 9), ("layers", 6),
    ("pool_gib", 8),
    ("blocks", 9), ("resolve_us", 10), ("total_us", 9), ("fetch_gbps", 10), ("link_gbps", 9),
    ("over_floor", 10), ("floor_us", 8),
    ("exact", 5),
)  # fmt: skip


def print_table(rows: list[dict[str, Any]], batch: int) -> None:
    print(" ".join(f"{name:>{width}}" for name, width in COLUMNS))
    for row in rows:
        if row["batch"] == batch:
            print(
                " ".join(
                    f"{row.get(name) if row.get(name) is not None else '-':>{width}}"
                    for name, width in COLUMNS
                )
            )


def draw(result: dict[str, Any], path: Path) -> None:
    """Total time over batch, one panel a miss rate, 656-byte rows out of the smaller pool."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [
        r for r in result["rows"] if r["row_bytes"] == 656 and r["layers"] == 1 and r["blocks"] == "scattered"
    ]
    pool = min(r["pool_gib"] for r in rows)
    misses = sorted({r["miss_pct"] for r in rows})
    styles = {
        "ours": ("total_us", "ours, total", "#0b6e4f", "-"),
        "ours_resolve": ("resolve_us", "ours, resolve alone", "#0b6e4f", ":"),
        "vllm_wide_hash": ("total_us", "vLLM in-tree, hash twice as large", "#c8553d", "-"),
        "vllm": ("total_us", "vLLM in-tree, as shipped", "#888888", "-"),
    }
    figure, axes = plt.subplots(1, len(misses), figsize=(3.3 * len(misses), 3.4), sharey=True, squeeze=False)
    for axis, miss in zip(axes[0], misses, strict=True):
        for name, (field, label, color, line) in styles.items():
            impl = name.removesuffix("_resolve")
            chosen = [
                r for r in rows
                if r["impl"] == impl and r["miss_pct"] == miss and r["pool_gib"] == pool
                and (impl != "ours" or r["policy"] == "lrfu")
            ]  # fmt: skip
            if chosen:
                axis.plot(
                    [r["batch"] for r in chosen],
                    [r[field] for r in chosen],
                    line,
                    color=color,
                    label=label,
                    marker=".",
                )
        axis.set(xscale="log", yscale="log", title=f"{miss:g} % misses", xlabel="batch")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel(f"µs a layer, 656-byte rows, {pool:g} GiB pool")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(f"Resolve and fetch, k = 2048, {result['gpu']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
