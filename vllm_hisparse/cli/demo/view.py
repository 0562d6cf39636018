"""The demo on a terminal: one picture of everything seen so far, redrawn as frames come."""

from collections import Counter
from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_hisparse.cli.demo import sizes
from vllm_hisparse.cli.demo.frames import Mode, Phase, RequestFrame, Step
from vllm_hisparse.cli.demo.looks import CELLS, HOST_ONLY, PAGES, PHASES, REQUESTS, Look
from vllm_hisparse.cli.demo.progress import TITLES, Progress, RunProgress
from vllm_hisparse.scheduler.snapshot import CellKind

__all__ = ["View", "header", "timeline"]

EXPLANATION = (
    "A top-k sparse model reads few selected rows of KV a step, yet a server keeps all rows on the GPU and "
    "preempts\nrequests when it is full. HiSparse keeps all KV in host memory, on the GPU what is read: both "
    "go on, bit for bit."
)
NOTES = {
    Mode.PLAIN: "HiSparse off: a request decodes with all its pages in the pool, or it has to wait",
    Mode.REFERENCE: "HiSparse off, and room for everything: what the outputs have to be",
}
TOKEN_LINES = 2
HOST_BAR = 24
PLAIN_KINDS = (CellKind.RESIDENT, CellKind.FREE, CellKind.CACHED)
HISPARSE_KINDS = (
    CellKind.RESIDENT,
    CellKind.MIRRORED,
    CellKind.LOOSE,
    CellKind.HOT,
    CellKind.INDEXER,
    CellKind.FREE,
)


class View:
    """Draws `progress` as it is when rich asks."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The whole picture, about 30 lines."""
        run, width = self._progress.run, options.max_width
        yield header(self._progress)
        yield _stages(self._progress)
        yield timeline(self._progress, width)
        if run.latest is None:
            yield _panel("", Text("starting vLLM ...", style="grey62"))
            return
        yield _pool(run, run.latest, width)
        panels = [_request(run, request, width // 2) for request in run.latest.requests]
        yield Columns(panels, padding=(0, 0), expand=True, equal=True)


def header(progress: Progress) -> RenderableType:
    """What this is about, and what runs."""
    started = next((run.started for run in progress.runs.values() if run.started), None)
    versions = f"vLLM {started.versions['vllm']}, " if started else ""
    setup = (
        f"A real engine: {versions}GLM-DSA with {len(sizes.INDEX_PATTERN)} layers and random weights, "
        f"top-{sizes.INDEX_TOPK}. CPU memory stands for the GPU's."
    )
    body = Text(EXPLANATION + "\n").append(setup, style="grey62")
    return _panel("vllm-hisparse demo", body)


def timeline(progress: Progress, width: int) -> RenderableType:
    """What each request did, step by step, on one scale for all runs."""
    rows = Table.grid(padding=(0, 1))
    num_columns = max(width - 38, 10)
    min_steps = len(sizes.NAMES) * sizes.NEW_TOKENS  # as many as if they decode one after the other
    for mode, run in progress.runs.items():
        for i, name in enumerate(sizes.NAMES):
            columns = progress.columns(mode, name, num_columns, min_steps)
            title = f"{TITLES[mode] if i == 0 else '':14}"
            mean = f"{run.mean_decoding:.2f} decoding" if i == 0 and run.num_steps else ""
            style = "bold" if mode is progress.current else "grey70"
            rows.add_row(Text(title, style), _named(name), _bar(columns), Text(mean, style))
    span = progress.span(num_columns, min_steps)
    legend = Text()
    for phase in (Phase.DECODING, Phase.PREFILL, Phase.PREEMPTED, Phase.WAITING):
        legend.append(PHASES[phase].column * 2, PHASES[phase].style).append(f" {phase.value}    ", "grey62")
    return _panel(f"who decodes when, {span} engine steps a column", rows, legend)


def _bar(columns: Iterable[Phase | None]) -> Text:
    bar = Text()
    for phase in columns:
        look = PHASES[phase or Phase.FINISHED]
        bar.append(look.column, look.style)
    return bar


def _stages(progress: Progress) -> RenderableType:
    """The three runs in a line."""
    line = Text(" ")
    for i, (mode, run) in enumerate(progress.runs.items(), 1):
        current = mode is progress.current and run.finished is None
        line.append(f" {i} {run.title} ", "bold black on #ffb454" if current else "bold")
        line.append(f" {_stage(run) or ('starting' if current else '')}    ", "grey70")
    return line


def _stage(run: RunProgress) -> str:
    if run.finished is None:
        return f"step {run.num_steps}" if run.num_steps else ""
    times = "once" if run.num_preemptions == 1 else f"{run.num_preemptions} times"
    return f"done in {run.finished.seconds:.0f} s, preempted {times}"


def _pool(run: RunProgress, step: Step, width: int) -> RenderableType:
    assert run.started is not None
    pool = run.started.pool
    title = (
        f"GPU block pool of {run.title}: {pool.num_blocks} blocks x {pool.block_bytes:,} B = "
        f"{pool.num_bytes / 1e6:.2f} MB, {step.num_free_blocks} free"
    )
    note = Text(NOTES[run.mode], "grey62") if run.mode in NOTES else _host_line(run, step)
    parts = [_cells(step, width - 4), _legend(run), note]
    return _panel(title, *parts)


def _cells(step: Step, width: int) -> Text:
    """Every block, two characters and a gap."""
    per_line = max(width // 3, 1)
    text = Text()
    for i, cell in enumerate(step.cells):
        if i and i % per_line == 0:
            text.append("\n")
        look = CELLS[cell.kind]
        text.append((cell.name or " ") + look.mark, look.style).append(" ")
    return text


def _legend(run: RunProgress) -> Text:
    looks = [CELLS[kind] for kind in (HISPARSE_KINDS if run.mode is Mode.HISPARSE else PLAIN_KINDS)]
    if run.mode is Mode.HISPARSE:
        looks.append(HOST_ONLY)
    text = Text()
    for look in looks:
        text.append(f" {look.mark}", look.style).append(f" {look.legend}  ", "grey62")
    return text


def _host_line(run: RunProgress, step: Step) -> Text:
    assert run.started is not None
    room = run.started.pool.num_host_blocks - 1  # one is vLLM's null block
    filled = round(HOST_BAR * step.num_used_host_blocks / room)
    text = Text("host pool ").append("█" * filled, "#35a7b8").append("░" * (HOST_BAR - filled), "grey37")
    text.append(f" {step.num_used_host_blocks} of {room} pages   rows read through hot regions: ")
    return text.append(f"{step.hits:,} hits, {step.misses:,} misses")


def _request(run: RunProgress, request: RequestFrame, width: int) -> RenderableType:
    look = PHASES[request.phase]
    total = request.prompt_tokens + request.num_new_tokens
    state = Text(f"{look.symbol} {request.phase.value:10}", look.style)
    state.append(f" {request.prompt_tokens} + {request.num_new_tokens} new = {total} tokens", "default")
    if request.num_preemptions:
        state.append(f"  {request.num_preemptions} x preempted", PHASES[Phase.PREEMPTED].style)
    lines = [state, _residency(request), _pages(run, request), *_tokens(request, width - 4)]
    for line in lines:
        line.no_wrap = True
    title = Text("request ", "default").append_text(_named(request.name))
    return _panel(title, *lines, width=width)


def _residency(request: RequestFrame) -> Text:
    if not request.residency:
        return Text("")
    text = Text("residency ").append(request.residency.capitalize(), "bold")
    counts = Counter(request.pages)
    if num_host_only := counts["host"] + counts["landing"]:
        text.append(f": {num_host_only} of {len(request.pages)} pages host only", "grey70")
    if request.hot_rows:
        text.append(f", {request.hot_rows} hot rows", "grey70")
    return text


def _pages(run: RunProgress, request: RequestFrame) -> Text:
    """The request's pages from the start of its context."""
    looks: list[Look] = [PAGES[state] for state in request.pages]
    if not looks and run.latest is not None:
        looks = [CELLS[c.kind] for c in run.latest.cells if c.name == request.name]
    text = Text("pages ")
    for look in looks:
        text.append(f"{look.mark} ", look.style)
    return text if looks else text.append("none on the GPU", "grey62")


def _tokens(request: RequestFrame, width: int) -> list[Text]:
    """The last tokens, as many as fit."""
    lines: list[str] = []
    words = [f"w{token}" for token in reversed(request.tokens)]
    for _ in range(TOKEN_LINES):
        line = ""
        while words and len(line) + len(words[0]) + 1 <= width - 2:
            line = f"{words.pop(0)} {line}"
        lines.insert(0, line)
    return [Text(line or "", "grey70") for line in lines]


def _panel(title: str | Text, *parts: RenderableType, width: int | None = None) -> Panel:
    shown = Text(title, "bold default") if isinstance(title, str) else title
    return Panel(
        Group(*parts), title=shown if title else None, title_align="left", border_style="grey37", width=width
    )


def _named(name: str) -> Text:
    return Text(name, f"bold {REQUESTS[name]}")
