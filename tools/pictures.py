"""Pictures of how it works, from the tables and sizes that the code runs on: docs/pictures/*.svg."""

from svg import (
    BLUE,
    BLUE_SOFT,
    GREEN,
    GREEN_SOFT,
    GREY_SOFT,
    INK,
    LINE,
    ORANGE,
    ORANGE_SOFT,
    PAPER,
    SOFT,
    Drawing,
    Point,
)

from vllm_hisparse.config import GIB
from vllm_hisparse.planning.estimate import Setup, estimate
from vllm_hisparse.planning.layout import Layout
from vllm_hisparse.planning.machines import kv_memory_bytes
from vllm_hisparse.planning.models import load_model
from vllm_hisparse.scheduler.residency import STATES, TRANSITIONS, Device, Event, Host, PageState

# ---- the life of a page: columns are the device's copy, rows the host's

COLUMN = {Device.LEASED: 310.0, Device.LOOSE: 610.0, Device.GONE: 790.0, Device.ARRIVING: 985.0}
ROW = {Host.NONE: 110.0, Host.PENDING: 235.0, Host.VALID: 385.0}
HEADING = {
    Device.LEASED: "device: leased",
    Device.LOOSE: "loose, still readable",
    Device.GONE: "gone",
    Device.ARRIVING: "arriving",
}
ASIDE = {
    PageState.DIRTY: -100.0,
    PageState.SPILLING: -100.0,
    PageState.ENQUEUED: 100.0,
    PageState.CLEAN: 100.0,
}
# Pages that another engine has computed join at DIRTY or HOST: two states of their own, left out here.
MOVES = {move: after for move, after in TRANSITIONS.items() if move[1] is not Event.IMPORTED}
IMPORTED = {before for before, event in TRANSITIONS if event is Event.IMPORTED}
BOX_WIDTH, BOX_HEIGHT = 128.0, 44.0
# Ways around states that a straight line would cross: (points, whether it is a curve, place of the label).
AROUND: dict[tuple[PageState, PageState], tuple[list[Point], bool, Point]] = {
    (PageState.DIRTY, PageState.CLEAN): ([(144, 110), (126, 110), (126, 385), (344, 385)], False, (180, 380)),
    (PageState.CLEAN, PageState.HOST): ([(440, 409), (600, 478), (760, 409)], True, (600, 449)),
    (PageState.RESTORING, PageState.CLEAN): ([(985, 409), (700, 600), (400, 409)], True, (690, 510)),
}


def page_life() -> str:
    """The transition table as a picture. Raises ValueError for a way that no transition takes."""
    moves = {(before, after) for (before, _), after in MOVES.items()}
    if not set(AROUND) <= moves:
        raise ValueError(f"got ways around for {set(AROUND) - moves}; need transitions")
    drawing = Drawing(1080, 550, "The life of a page: its states by what device and host have of it")
    for device, x in COLUMN.items():
        width = 400 if device is Device.LEASED else 160
        readable = device in (Device.LEASED, Device.LOOSE)
        drawing.box(x - width / 2, 26, width, 410, GREEN_SOFT if readable else GREY_SOFT, PAPER, 10)
        drawing.text(x, 50, HEADING[device], 14, GREEN if readable else SOFT, "middle", bold=True)
    for host, y in ROW.items():
        drawing.text(14, y + 5, f"host: {host.value}", 13, SOFT)
    for (before, event), after in MOVES.items():
        _transition(drawing, before, event, after)
    for state in sorted(set(PageState) - IMPORTED):
        x, y = _centre(state)
        drawing.box(x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, PAPER, INK)
        drawing.text(x, y + 5, state.name, 14, INK, "middle", bold=True)
    drawing.text(
        540, 536, "on green the rows are read from the device, else from the host", 12, SOFT, "middle"
    )
    return str(drawing)


def _centre(state: PageState) -> Point:
    device, host, _ = STATES[state]
    return COLUMN[device] + ASIDE.get(state, 0), ROW[host]


def _transition(drawing: Drawing, before: PageState, event: Event, after: PageState) -> None:
    start, end = _centre(before), _centre(after)
    anchor = "middle"
    if (before, after) in AROUND:
        points, is_curve, place = AROUND[before, after]
        drawing.arrow(points, SOFT, is_curve)
    else:
        is_vertical = start[0] == end[0]
        has_return = any(s is after and t is before for (s, _), t in TRANSITIONS.items())
        # Of a pair in opposite directions, one is drawn above the other, or left of it.
        forward = end > start if is_vertical else end[0] > start[0]
        shift = (-11.0 if forward else 11.0) if has_return else 0.0
        dx, dy = (shift, 0.0) if is_vertical else (0.0, shift)
        start, end = (start[0] + dx, start[1] + dy), (end[0] + dx, end[1] + dy)
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        if is_vertical:
            place, anchor = ((x - 6, y + 4), "end") if shift < 0 else ((x + 6, y + 4), "start")
        else:
            place = (x, y + (-6 if shift <= 0 else 16))
        drawing.arrow([_edge(start, end), _edge(end, start)], SOFT)
    drawing.text(*place, event.value, 12.5, INK, anchor, halo=True)


def _edge(centre: Point, towards: Point) -> Point:
    """Where the line from a box's centre leaves the box."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    scale = min(
        (BOX_WIDTH / 2 + 2) / abs(dx) if dx else float("inf"),
        (BOX_HEIGHT / 2 + 2) / abs(dy) if dy else float("inf"),
    )
    return centre[0] + dx * scale, centre[1] + dy * scale


# ---- memory: sizes as planned for one model on one GPU

MODEL, GPU, RANKS, CONTEXT, HOST_GIB = "glm-5.2", "h200", 8, 131072, 256


def memory() -> str:
    """Both pools, with the sizes of a real plan."""
    model = load_model(MODEL)
    setup = Setup(model, kv_memory_bytes(model, GPU, RANKS, 0), CONTEXT, HOST_GIB * GIB)
    layout = estimate(setup).layout
    group = max(len(names) for names in layout.index_groups)
    drawing = Drawing(990, 560, "Device pool and host pool")
    drawing.text(24, 34, "Device pool", 17, INK, bold=True)
    drawing.text(
        130,
        34,
        f"one tensor, {layout.num_device_blocks:,} blocks of {layout.block_stride_bytes:,} bytes",
        13,
        SOFT,
    )
    kinds = [
        ("keys", BLUE_SOFT, BLUE),
        *[(f"page, part {part + 1}", GREEN_SOFT, GREEN) for part in range(3)],
        ("hot region", ORANGE_SOFT, ORANGE),
        ("hot region", ORANGE_SOFT, ORANGE),
        ("keys", BLUE_SOFT, BLUE),
        ("free", PAPER, SOFT),
    ]
    for i, (text, fill, colour) in enumerate(kinds):
        drawing.box(24 + i * 118, 50, 112, 40, fill, colour, 5, dashed=text == "free")
        drawing.text(80 + i * 118, 75, text, 13, colour, "middle")
    _three_uses(drawing, layout)
    drawing.text(24, 312, "Host pool", 17, INK, bold=True)
    host = f"pinned, {layout.num_host_blocks:,} blocks of {layout.host_block_bytes:,} bytes"
    drawing.text(116, 312, f"{host}; one region an index group", 13, SOFT)
    shown = [0, 1, len(layout.index_groups) - 1]
    for i, index in enumerate(shown):
        x = 24 + i * 316
        layers = len(layout.index_groups[index])
        drawing.box(x, 328, 300, 132, GREY_SOFT, LINE)
        plural = "layers" if layers > 1 else "layer"
        drawing.text(x + 12, 350, f"index group {index + 1}, {layers} {plural}", 13, INK, bold=True)
        for row in range(4):
            for layer in range(layers):
                width = (276 - 6 * (layers - 1)) / layers
                drawing.box(x + 12 + layer * (width + 6), 362 + row * 22, width, 16, PAPER, SOFT, 3)
        if i == len(shown) - 1:
            drawing.box(x + 8, 380, 284, 24, "none", ORANGE, 4)
    drawing.text(
        24, 486, "a row: one token in all layers of the group; 64 rows are a page of the group", 13, SOFT
    )
    drawing.text(24, 506, "a request's pages follow each other where they can", 13, SOFT)
    drawing.text(
        966,
        486,
        f"a miss is one contiguous read: {group} x {layout.row_bytes} bytes",
        13,
        ORANGE,
        "end",
        bold=True,
    )
    drawing.text(966, 506, "it serves the leader and its followers", 13, ORANGE, "end")
    drawing.text(
        24,
        542,
        f"{MODEL}, fp8 rows, {RANKS} x {GPU.upper()}, {CONTEXT:,} tokens; of one GPU, and of its node",
        12,
        SOFT,
    )
    return str(drawing)


def _three_uses(drawing: Drawing, layout: Layout) -> None:
    """What is in a block, for each use."""
    leaders, layers = len(layout.indexer_layers), sorted({len(p) for p in layout.parts}, reverse=True)
    of = " or ".join(map(str, layers))
    uses = [
        (BLUE_SOFT, BLUE, "indexer block", [
            f"keys of {layout.indexer_pages} x {layout.page_tokens} tokens",
            f"of all {leaders} leaders;",
            "never leaves the device",
        ]),
        (GREEN_SOFT, GREEN, "resident block", [
            f"{layout.page_tokens} rows of a request, {of} of",
            f"{len(layout.layers)} layers; a page is {layout.num_parts} of them,",
            "given up and restored as a whole",
        ]),
        (ORANGE_SOFT, ORANGE, "hot block", [
            f"{layout.page_tokens} slots, laid out like a page;",
            "any row of the request that a",
            "selection brought back",
        ]),
    ]  # fmt: skip
    for i, (fill, colour, title, lines) in enumerate(uses):
        x = 24 + i * 316
        drawing.box(x, 118, 300, 160, fill, colour)
        drawing.text(x + 14, 142, title, 15, colour, bold=True)
        drawing.lines(x + 14, 166, lines, 13)
        for column in range(4 if i else 3):
            width = 66 if i else 88
            drawing.box(x + 14 + column * (width + 4), 226, width, 38, PAPER, colour, 3)
            label = ("page", f"layer {column + 1}", f"layer {column + 1}")[i]
            last = column == (3 if i else 2)
            drawing.text(
                x + 14 + column * (width + 4) + width / 2, 250, "..." if last else label, 12, colour, "middle"
            )


# ---- how it works: the picture of the README


def overview() -> str:
    """Scheduler, worker and the two pools."""
    drawing = Drawing(990, 500, "How vllm-hisparse works")
    drawing.box(20, 20, 360, 210)
    drawing.text(38, 48, "Scheduler", 17, INK, bold=True)
    drawing.text(38, 74, "page states and leases; watermarks decide", 13, SOFT)
    drawing.text(118, 222, "dashed: only the host has the page", 12, SOFT)
    _request(drawing, 92, "A", "Full", "gggggggg", 0)
    _request(drawing, 130, "B", "Mixed", "ggghhhhg", 2)
    _request(drawing, 168, "C", "Mixed", "ghhhhhhg", 2)
    drawing.box(610, 20, 360, 210)
    drawing.text(628, 48, "Worker, every rank", 17, INK, bold=True)
    drawing.text(628, 74, "the indexer selects 2,048 rows; the resolver finds them,", 13, SOFT)
    drawing.text(628, 92, "once an index group, inside the decode graph", 13, SOFT)
    outcomes = [
        (GREEN_SOFT, GREEN, "on a resident page", "read in place"),
        (ORANGE_SOFT, ORANGE, "in a hot slot", "read in place"),
        (GREY_SOFT, SOFT, "a miss", "fetched into a slot, then read"),
    ]
    for i, (fill, colour, text, then) in enumerate(outcomes):
        drawing.box(628, 106 + i * 38, 150, 30, fill, colour, 5)
        drawing.text(703, 126 + i * 38, text, 13, colour, "middle")
        drawing.text(790, 126 + i * 38, then, 13, INK)
    drawing.arrow([(384, 90), (606, 90)])
    drawing.text(495, 80, "what changed, a few integers", 12.5, INK, "middle")
    drawing.arrow([(606, 160), (384, 160)])
    drawing.text(495, 150, "copies enqueued, completed", 12.5, INK, "middle")
    _pools(drawing)
    return str(drawing)


def _request(drawing: Drawing, y: float, name: str, residency: str, pages: str, hot: int) -> None:
    drawing.text(38, y + 19, f"{name}  {residency}", 13, INK, bold=True)
    for i, page in enumerate(pages):
        on_device = page == "g"
        drawing.box(
            118 + i * 24,
            y + 2,
            20,
            24,
            GREEN_SOFT if on_device else PAPER,
            GREEN if on_device else SOFT,
            3,
            not on_device,
        )
    for i in range(hot):
        drawing.box(322 + i * 24, y + 2, 20, 24, ORANGE_SOFT, ORANGE, 3)


def _pools(drawing: Drawing) -> None:
    drawing.text(20, 278, "Device pool: one tensor of blocks of one size", 14, INK, bold=True)
    kinds = "kgggggkgggooghkgoof"
    fills = {"k": (BLUE_SOFT, BLUE), "g": (GREEN_SOFT, GREEN), "o": (ORANGE_SOFT, ORANGE)}
    for i, kind in enumerate(kinds):
        fill, stroke = fills.get(kind, (PAPER, SOFT))
        drawing.box(20 + i * 50, 290, 46, 34, fill, stroke, 4, dashed=kind in "hf")
    for x, colour, text in (
        (380, BLUE, "keys"),
        (450, GREEN, "resident pages"),
        (585, ORANGE, "hot regions"),
        (700, SOFT, "free"),
    ):
        drawing.box(x, 267, 12, 12, PAPER if colour == SOFT else colour, colour, 2)
        drawing.text(x + 18, 278, text, 13, SOFT)
    drawing.text(
        20, 480, "Host pool, pinned: every page that had to leave, group by group", 14, INK, bold=True
    )
    for i in range(19):
        filled = i < 15
        drawing.box(20 + i * 50, 420, 46, 34, GREY_SOFT if filled else PAPER, SOFT, 4, dashed=not filled)
    for x, points, colour, text in (
        (190, [(180, 328), (180, 416)], GREEN, "spill: a sealed page is copied before it has to leave"),
        (560, [(550, 416), (550, 328)], ORANGE, "one read a miss"),
        (780, [(770, 416), (770, 328)], GREEN, "restore, when there is room"),
    ):
        drawing.arrow(points, colour)
        drawing.text(x, 376, text, 13, colour)


PICTURES = {"overview": overview, "page-life": page_life, "memory": memory}
