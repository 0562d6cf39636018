"""Documents and the dashboard agree with the code and with each other."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import Counter, Histogram

from vllm_hisparse.metrics import METRICS, Metric

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
HAND_WRITTEN = ("tuning.md", "getting-started.md", "operations.md")
NAME = re.compile(r"vllm:hisparse_([a-z_]+)")


def exported(metric: Metric) -> set[str]:
    """Names of a metric's series, without the prefix."""
    if metric.kind is Counter:
        return {f"{metric.key}_total"}
    if metric.kind is Histogram:
        return {f"{metric.key}_{suffix}" for suffix in ("bucket", "sum", "count")}
    return {metric.key}


SERIES = {name: metric for metric in METRICS for name in exported(metric)}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
    return content


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_uses_every_metric_and_no_other(dashboard: dict[str, Any]) -> None:
    used = {name for expression in expressions(dashboard) for name in NAME.findall(expression)}
    assert used <= set(SERIES), "no such series"
    assert {SERIES[name].key for name in used} == {metric.key for metric in METRICS}


def test_the_dashboard_groups_by_labels_that_exist(dashboard: dict[str, Any]) -> None:
    for expression in expressions(dashboard):
        for label in re.findall(r"by \((\w+)\)", expression):
            owners = {SERIES[name].label for name in NAME.findall(expression)}
            assert label == "le" or owners == {label}, expression
        for name in NAME.findall(expression):
            assert (SERIES[name].kind is Counter) <= ("rate(" in expression or "rows_total" in name)


def test_the_dashboard_is_laid_out(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {"title", "uid", "schemaVersion", "templating", "time"} <= set(dashboard)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used == variables | {"__rate_interval"}
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    for a, b in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (a, b)


def test_operations_says_what_to_do_about_every_metric() -> None:
    text = (DOCS / "operations.md").read_text()
    section = text[text.index("## Metrics") : text.index("## Alerts")]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(metric.key for metric in METRICS)


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_series_in_text_exist(name: str) -> None:
    text = (DOCS / name).read_text()
    for series in NAME.findall(text.replace("`vllm:hisparse_`", "")):
        assert series in SERIES, series


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("picture", sorted(DOCS.glob("pictures/*.svg")), ids=lambda path: path.name)
def test_labels_of_pictures_are_apart(picture: Path) -> None:
    """Two texts in one place cannot be read: a new transition may need a way of its own."""
    places = re.findall(r'<text (x="[^"]*" y="[^"]*")', picture.read_text())
    assert len(places) == len(set(places)) > 10


def test_every_document_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [path.name for path in DOCUMENTS if path.name != "README.md" and path.name not in text] == []


def test_reliability_names_tests_that_exist() -> None:
    """One row for each kind of fault; the last file named in a row is that of the names after it."""
    section = (DOCS / "reliability.md").read_text().split("## Kinds of faults seen elsewhere")[1]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 20
    for row in rows:
        names = re.findall(r"`([\w/.]+\.py::)?(test_\w+)`", row)
        assert names or "**none yet**" in row, row
        text = ""
        for file, name in names:
            text = (ROOT / file.removesuffix("::")).read_text() if file else text
            assert f"def {name}(" in text, (file, name)
