"""Selection traces: what an indexer chose, step by step. One format for recordings, other tools and tests.

A trace is an npz archive of

    top         integers [streams, steps, k]  positions that a step selected, -1 for padding
    prompt_len  integer, or one a stream: the row that is new at step t has position prompt_len + t
    newest      integers [streams, steps], instead of prompt_len, where a stream's steps are not consecutive

and, where they are known,

    host        bool [streams, steps, k]  whether the row was on the host only, so that a hot region served it
    group       integers [streams]  index group of a stream
    request     integers [streams]  running number of the request of a stream
    scores      floats [streams, steps, positions]  the indexer's logits (nats) of every position
    threshold   floats [streams, steps]  the lowest selected score

A stream is one index group of one request. Streams that are shorter than others end in steps of padding.
Imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from numpy.typing import NDArray

__all__ = ["Integers", "Trace", "load_trace", "save_trace"]

Integers = NDArray[np.int32]
_OPTIONAL = ("host", "group", "request", "scores", "threshold")


@dataclass(frozen=True)
class Trace:
    """Selections of one or more streams. Positions are distinct within a step of a stream."""

    top: Integers  # [streams, steps, k], -1: padding
    newest: Integers  # [streams, steps], position of the row that the step itself wrote
    host: NDArray[np.bool_] | None = None  # [streams, steps, k]
    group: Integers | None = None  # [streams]
    request: Integers | None = None  # [streams]
    scores: NDArray[np.floating[Any]] | None = None  # [streams, steps, positions]
    threshold: NDArray[np.floating[Any]] | None = None  # [streams, steps]

    @property
    def num_streams(self) -> int:
        return self.top.shape[0]

    @property
    def num_steps(self) -> int:
        """Steps of the longest stream."""
        return self.top.shape[1]

    @property
    def top_k(self) -> int:
        return self.top.shape[2]

    @property
    def num_positions(self) -> int:
        """One more than the highest position that is selected or written."""
        return int(max(self.top.max(initial=-1), self.newest.max(initial=-1))) + 1

    @property
    def num_selected(self) -> NDArray[np.int64]:
        """Selected positions, [streams, steps]."""
        return (self.top >= 0).sum(-1)

    def only_host(self) -> Trace:
        """The selections that a hot region had to serve. Raises ValueError if the trace does not tell."""
        if self.host is None:
            raise ValueError(
                "got a trace without `host`; need one recorded by `trace_path` because only an engine knows "
                "which rows it had on the device"
            )
        return replace(self, top=np.where(self.host, self.top, -1))


def load_trace(path: Path) -> Trace:
    """Reads a trace. Raises ValueError if the file is not one, OSError if it cannot be read."""
    with path.open("rb") as file:
        if not is_zipfile(file):
            raise _bad(path, "no npz archive", "the arrays of a trace")
    with np.load(path, allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    missing = "top" if "top" not in arrays else None
    if missing is None and not {"prompt_len", "newest"} & arrays.keys():
        missing = "prompt_len"
    if missing:
        raise _bad(path, f"keys {sorted(arrays)}", f"`{missing}`")
    top = arrays["top"]
    if top.ndim != 3 or 0 in top.shape or not np.issubdtype(top.dtype, np.integer):
        raise _bad(path, f"`top` {top.dtype} {list(top.shape)}", "integers [streams, steps, k]")
    _check_shapes(path, arrays)
    if "newest" in arrays:
        newest = arrays["newest"].astype(np.int32)
    else:
        prompt_len = arrays["prompt_len"].astype(np.int32).reshape(-1, 1)
        newest = np.broadcast_to(prompt_len + np.arange(top.shape[1], dtype=np.int32), top.shape[:2])
    optional = {key: arrays[key] for key in _OPTIONAL if key in arrays}
    return Trace(top=_distinct(top.astype(np.int32)), newest=newest, **optional)


def save_trace(path: Path, trace: Trace) -> None:
    """Writes a trace, compressed. The file appears under its name only once it is complete."""
    arrays: dict[str, Any] = {"top": trace.top, "newest": trace.newest}
    arrays.update((key, value) for key in _OPTIONAL if (value := getattr(trace, key)) is not None)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    partial.replace(path)


def _check_shapes(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    streams, steps, k = arrays["top"].shape
    wanted = {
        "newest": (streams, steps),
        "host": (streams, steps, k),
        "group": (streams,),
        "request": (streams,),
        "threshold": (streams, steps),
    }
    for key, shape in wanted.items():
        if key in arrays and arrays[key].shape != shape:
            raise _bad(path, f"`{key}` {list(arrays[key].shape)}", f"{list(shape)}")
    if "prompt_len" in arrays and arrays["prompt_len"].size not in (1, streams):
        raise _bad(path, f"{arrays['prompt_len'].size} prompt lengths", f"1 or {streams}")
    if "scores" in arrays:
        scores = arrays["scores"]
        if scores.ndim != 3 or scores.shape[:2] != (streams, steps):
            raise _bad(path, f"`scores` {list(scores.shape)}", f"[{streams}, {steps}, positions]")
        if scores.shape[2] <= arrays["top"].max():
            raise _bad(path, f"scores of {scores.shape[2]} positions", f"{int(arrays['top'].max()) + 1}")
        if "threshold" not in arrays:
            raise _bad(path, "`scores` alone", "`threshold` too")


def _distinct(top: Integers) -> Integers:
    """The selection with every repeated position of a step, after its first occurrence, made padding."""
    order = np.argsort(top, axis=-1, kind="stable")
    ordered = np.take_along_axis(top, order, -1)
    repeated = np.zeros(top.shape, dtype=bool)
    np.put_along_axis(repeated, order[..., 1:], (ordered[..., 1:] == ordered[..., :-1]), -1)
    return np.where(repeated | (top < 0), np.int32(-1), top)


def _bad(path: Path, got: str, need: str) -> ValueError:
    return ValueError(f"{path.name}: got {got}; need {need} because that is the format of a trace")
