"""docs/grafana.json: every metric of the plugin on one dashboard."""

import json
from dataclasses import dataclass
from typing import Any

COLUMNS = 24  # of Grafana's grid
WIDTH, HEIGHT = 8, 8  # of a panel
SELECT = '{model_name=~"$model_name", engine=~"$engine"}'
INTERVAL = "$__rate_interval"
SOURCE = {"type": "prometheus", "uid": "${source}"}
SOURCE_VARIABLE = {
    "name": "source",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "current": {},
}


@dataclass(frozen=True)
class Panel:
    """One graph: (expression, legend) each; `<name>` stands for `vllm:hisparse_<name>` with the selection."""

    title: str
    description: str
    unit: str
    series: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def rate(name: str, by: str = "") -> str:
    """Sum of a counter's rate."""
    return f"sum{f' by ({by})' if by else ''}(rate(<{name}_total>[{INTERVAL}]))"


def total(name: str, by: str = "") -> str:
    """Sum of a gauge."""
    return f"sum{f' by ({by})' if by else ''}(<{name}>)"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile of a histogram."""
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate(<{name}_bucket>[{INTERVAL}])))", text)
        for q, text in ((0.5, "median"), (0.99, "99 %"))
    )


READ = rate("hits") + " + " + rate("misses")
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests and pages",
        (
            Panel(
                "Requests by residency",
                "full: every page on the device. mixed: some on the host only. none: all of them.",
                "short",
                ((total("requests", "residency"), "{{residency}}"),),
            ),
            Panel(
                "Pages by state",
                "docs/residency.md says what each state is. loose pages count as free but still serve.",
                "short",
                ((total("pages", "state"), "{{state}}"),),
            ),
            Panel(
                "Free device blocks",
                "Below the low watermark pages are given up; above the high one they return.",
                "short",
                ((total("free_device_blocks"), "free blocks"),),
            ),
        ),
    ),
    (
        "Selected rows",
        (
            Panel(
                "Rows read from the host",
                "Misses a selected row, of rows that only the host has: the larger, the more decode "
                "waits for the link.",
                "percentunit",
                ((f"{rate('misses')} / ({READ})", "miss rate"),),
            ),
            Panel(
                "Where selected rows are",
                "Resident rows cost nothing; hits are served by hot regions; misses are read from the host.",
                "rowsps",
                (
                    (rate("resident_rows"), "resident"),
                    (rate("hits"), "hot region"),
                    (rate("misses"), "host"),
                ),
            ),
            Panel(
                "Faults",
                "Rows without a readable copy or without a slot. Anything above 0 is a fault: outputs "
                "may be wrong.",
                "short",
                (
                    ("sum(<unreadable_rows_total>)", "unreadable"),
                    ("sum(<overflowed_rows_total>)", "overflowed"),
                ),
                kind="stat",
            ),
        ),
    ),
    (
        "The link",
        (
            Panel(
                "Bytes over the link, by rank",
                "Reads of misses and of prefills, pages to the host, pages back. PCIe Gen5 x16 carries about "
                "50 GB/s each way.",
                "Bps",
                (
                    (rate("host_read_bytes", "rank"), "misses, rank {{rank}}"),
                    (rate("prefill_read_bytes", "rank"), "prefills, rank {{rank}}"),
                    (rate("spilled_bytes", "rank"), "to the host, rank {{rank}}"),
                    (rate("restored_bytes", "rank"), "back, rank {{rank}}"),
                ),
            ),
            Panel(
                "Time of a transfer to the host",
                "From planning until every rank has completed it.",
                "s",
                quantiles("spill_seconds"),
            ),
            Panel(
                "Time of a transfer to the device",
                "From planning until every rank has completed it.",
                "s",
                quantiles("restore_seconds"),
            ),
        ),
    ),
    (
        "Scheduling",
        (
            Panel(
                "Page events",
                "Pages a second, by what happened to them.",
                "ops",
                ((rate("page_events", "event"), "{{event}}"),),
            ),
            Panel(
                "Watermark crossings",
                "Moves of the free-block level across a watermark. Many a second: the watermarks are "
                "too close.",
                "ops",
                ((rate("watermark_crossings", "into"), "{{into}}"),),
            ),
            Panel(
                "Waits and transfers in flight",
                "A request waited for copies instead of preempting another; transfers that some rank "
                "has not completed.",
                "short",
                (
                    (rate("waits_for_copies"), "waits a second"),
                    (rate("requests_passed"), "passed a second"),
                    (total("transfers_in_flight"), "in flight"),
                ),
            ),
        ),
    ),
    (
        "Memory",
        (
            Panel(
                "Hot regions",
                "Slots of all regions. They grow while selections miss and blocks are free.",
                "short",
                ((total("hot_rows"), "slots"),),
            ),
            Panel(
                "Region events",
                "Regions granted and returned, blocks grown and shrunk, a second.",
                "ops",
                ((rate("region_events", "event"), "{{event}}"),),
            ),
            Panel(
                "Imports",
                "Prompts computed by other engines: admitted, by where their pages land, and how that ended.",
                "ops",
                ((rate("imports", "event"), "{{event}}"),),
            ),
            Panel(
                "Host pool",
                "Blocks leased by requests or copies, and blocks that hold a published page. Evictions "
                "make room for new pages.",
                "short",
                (
                    (total("used_host_blocks"), "leased"),
                    (total("cached_host_blocks"), "published"),
                    (rate("host_evictions"), "evictions a second"),
                ),
            ),
            Panel(
                "Runs of host blocks",
                "Mean run of consecutive blocks of spilled pages. Longer runs are read up to 1.7 times "
                "faster.",
                "short",
                (("avg(<host_run_blocks>)", "blocks"),),
            ),
        ),
    ),
)


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, COLUMNS // WIDTH)
            place = {"x": column * WIDTH, "y": y + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += HEIGHT * (1 + (len(row) - 1) // (COLUMNS // WIDTH))
    content = {
        "title": "vLLM HiSparse",
        "uid": "vllm-hisparse",
        "tags": ["vllm", "hisparse"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [SOURCE_VARIABLE, _variable("model_name"), _variable("engine")]},
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(panel: Panel, panel_id: int, place: dict[str, int]) -> dict[str, Any]:
    drawn = {"fillOpacity": 10, "lineWidth": 2, "showPoints": "never"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "stat":
        steps = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    else:
        defaults["custom"] = drawn
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": _expression(expression),
                "legendFormat": text,
            }
            for i, (expression, text) in enumerate(panel.series)
        ],
    }


def _expression(expression: str) -> str:
    return expression.replace("<", "vllm:hisparse_").replace(">", SELECT)


def _variable(name: str) -> dict[str, Any]:
    query = f"label_values(vllm:hisparse_free_device_blocks, {name})"
    return {
        "name": name,
        "label": name.replace("_", " "),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
