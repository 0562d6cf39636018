"""Colours and marks of what the demo shows. A mark tells kinds apart where there is no colour."""

from typing import NamedTuple

from vllm_hisparse.cli.demo.frames import Phase
from vllm_hisparse.scheduler.residency import STATES, Device, Host, PageState
from vllm_hisparse.scheduler.snapshot import CellKind

__all__ = ["CELLS", "HOST_ONLY", "PAGES", "PHASES", "REQUESTS", "Look", "PhaseLook"]


class Look(NamedTuple):
    """How a block or page is drawn: two characters, the request's name and a mark."""

    mark: str
    style: str
    legend: str


class PhaseLook(NamedTuple):
    """How a request's phase is drawn: in words with a symbol, and as a column of the timeline."""

    symbol: str
    style: str
    column: str


CELLS = {
    CellKind.FREE: Look("·", "grey42 on grey15", "free"),
    CellKind.CACHED: Look("·", "grey58 on grey23", "free, kept for a prefix hit"),
    CellKind.INDEXER: Look("i", "white on #6a3fa0", "indexer keys"),
    CellKind.RESIDENT: Look("•", "black on #4cb050", "KV page"),
    CellKind.MIRRORED: Look("=", "black on #35a7b8", "copied to the host"),
    CellKind.LOOSE: Look("~", "black on #c8b04a", "given up, readable"),
    CellKind.HOT: Look("h", "white on #d0482f", "hot rows"),
    CellKind.ARRIVING: Look("<", "black on #8fb4ff", "coming back"),
    CellKind.HELD: Look("x", "grey58 on grey30", "being returned"),
}
HOST_ONLY = Look("_", "#7d9bd8 on #1c2f5c", "host only")

_OF_PAGE = {
    (Device.LEASED, Host.NONE): CELLS[CellKind.RESIDENT],
    (Device.LEASED, Host.PENDING): CELLS[CellKind.RESIDENT],
    (Device.LEASED, Host.VALID): CELLS[CellKind.MIRRORED],
    (Device.LOOSE, Host.PENDING): CELLS[CellKind.LOOSE],
    (Device.LOOSE, Host.VALID): CELLS[CellKind.LOOSE],
    (Device.GONE, Host.PENDING): HOST_ONLY,
    (Device.GONE, Host.VALID): HOST_ONLY,
    (Device.ARRIVING, Host.VALID): CELLS[CellKind.ARRIVING],
    (Device.ARRIVING, Host.NONE): CELLS[CellKind.ARRIVING],
    (Device.GONE, Host.ARRIVING): HOST_ONLY,
}
PAGES = {state.name.lower(): _OF_PAGE[STATES[state][:2]] for state in PageState}  # by a page's state

PHASES = {
    Phase.WAITING: PhaseLook("…", "grey62", "·"),
    Phase.PREFILL: PhaseLook("»", "#8fb4ff", "▒"),
    Phase.DECODING: PhaseLook("▶", "#4cb050", "█"),
    Phase.PREEMPTED: PhaseLook("✗", "bold #e05040", "x"),
    Phase.FINISHED: PhaseLook("✓", "grey62", " "),
}
REQUESTS = {"A": "#ffb454", "B": "#7fd1ff"}
