"""The trace format: what is read, what is written, and what is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_hisparse.traces import Trace, load_trace, save_trace


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, vllm_hisparse.traces, vllm_hisparse.policies.registry\n"
    code += "assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("prompt_len", [10, [10, 20]])
def test_newest_rows_follow_the_prompt(tmp_path: Path, prompt_len: Any) -> None:
    top = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    trace = load_trace(write(tmp_path / "t.npz", top=top, prompt_len=np.array(prompt_len)))
    second = 10 if prompt_len == 10 else 20
    assert trace.newest.tolist() == [[10, 11, 12], [second, second + 1, second + 2]]
    assert (trace.num_streams, trace.num_steps, trace.top_k) == (2, 3, 2)
    assert trace.num_positions == second + 3
    assert trace.top.dtype == np.int32
    assert trace.host is None and trace.scores is None


def test_repeated_positions_become_padding(tmp_path: Path) -> None:
    top = np.array([[[3, 1, 3, -1, 1, -9], [0, 0, 0, 0, 2, 2]]])
    trace = load_trace(write(tmp_path / "t.npz", top=top, prompt_len=4))
    assert trace.top.tolist() == [[[3, 1, -1, -1, -1, -1], [0, -1, -1, -1, 2, -1]]]
    assert trace.num_selected.tolist() == [[2, 2]]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    trace = Trace(
        top=np.array([[[3, 1], [2, -1]]], dtype=np.int32),
        newest=np.array([[3, 7]], dtype=np.int32),
        host=np.array([[[True, False], [True, False]]]),
        group=np.array([4], dtype=np.int32),
        request=np.array([2], dtype=np.int32),
    )
    path = tmp_path / "out.npz"
    save_trace(path, trace)
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]
    read = load_trace(path)
    for key in ("top", "newest", "host", "group", "request"):
        assert np.array_equal(getattr(read, key), getattr(trace, key)), key
    assert read.only_host().top.tolist() == [[[3, -1], [2, -1]]]


TOP = np.zeros((2, 3, 4), dtype=np.int32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tops": TOP}, "got keys ['tops']; need `top` because"),
        ({"top": TOP}, "got keys ['top']; need `prompt_len` because"),
        ({"top": TOP[0], "prompt_len": 1}, "got `top` int32 [3, 4]; need integers [streams, steps, k]"),
        ({"top": TOP[:, :0], "prompt_len": 1}, "got `top` int32 [2, 0, 4]; need"),
        ({"top": TOP / 2, "prompt_len": 1}, "got `top` float64 [2, 3, 4]; need"),
        ({"top": TOP, "prompt_len": [1, 2, 3]}, "got 3 prompt lengths; need 1 or 2"),
        ({"top": TOP, "newest": TOP[0]}, "got `newest` [3, 4]; need [2, 3]"),
        ({"top": TOP, "prompt_len": 1, "host": TOP[0] > 0}, "got `host` [3, 4]; need [2, 3, 4]"),
        ({"top": TOP, "prompt_len": 1, "scores": TOP}, "got `scores` alone; need `threshold` too"),
        ({"top": TOP + 9, "prompt_len": 1, "scores": TOP}, "got scores of 4 positions; need 10"),
        ({"top": TOP, "prompt_len": 1, "scores": TOP[:1]}, "got `scores` [1, 3, 4]; need [2, 3, positions]"),
    ],
)
def test_other_archives_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 the message is compared below
        load_trace(write(tmp_path / "bad.npz", **arrays))
    assert str(error.value).startswith(f"bad.npz: {message}")


def test_other_files_are_refused(tmp_path: Path) -> None:
    text, array = tmp_path / "text", tmp_path / "array.npy"
    text.write_text("no trace")
    np.save(array, TOP)
    for path in (text, array):
        with pytest.raises(ValueError, match="got no npz archive"):
            load_trace(path)


def test_a_recording_without_host_says_so() -> None:
    with pytest.raises(ValueError, match="got a trace without `host`; need one recorded by `trace_path`"):
        Trace(top=TOP, newest=TOP[..., 0]).only_host()
