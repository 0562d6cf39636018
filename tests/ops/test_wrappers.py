"""What surrounds the kernels: errors that say what is wrong, loading, schemas, and torch.compile."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.case import Geometry, Outputs, State, assert_same, random_step, random_tables
from vllm_hisparse import ops
from vllm_hisparse.ops import load
from vllm_hisparse.ops.checks import ShapeCheck


def resolve_arguments() -> dict[str, object]:
    random = np.random.default_rng(0)
    geometry = Geometry()
    step = random_step(geometry, random)
    outputs = Outputs.poisoned(geometry, len(step.topk), len(step.row_request), 1)
    return {
        "topk": step.topk,
        "query_start": step.query_start,
        **random_tables(geometry, random).given(step.row_request),
        **vars(State.empty(geometry)),
        **vars(outputs),
        "parts": [0],
        "block_size": geometry.block_size,
        "block_stride_rows": geometry.block_stride_rows,
        "max_query_rows": geometry.max_query_rows,
        "policy": 1,
    }


def in_schema_order(arguments: dict[str, object]) -> list[object]:
    return [arguments[argument.name] for argument in torch.ops.hisparse.resolve.default._schema.arguments]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("topk", torch.zeros(3, 8, dtype=torch.int64), r"got topk torch.int64 \[3, 8\].*need torch.int32"),
        ("host", torch.zeros(4, 17, dtype=torch.int32), r"got host .*\[max_requests = 4, max_pages = 16\]"),
        ("slot_of", torch.zeros(3, 128, dtype=torch.int32), r"slot_of torch.int32.*need torch.int16"),
        ("slot_of", torch.zeros(3, 127, dtype=torch.int16), r"max_positions 127; need 128"),
        ("key", torch.zeros(40, 3, dtype=torch.int32).T, r"key .* with strides .* contiguous"),
        ("plan_count", torch.zeros(0, dtype=torch.int32), r"plan_count .*need torch.int32 \[R >= "),
        ("counters", torch.zeros(7, dtype=torch.int64), r"counters .*need torch.int64 \[8\]"),
        ("parts", [2], r"parts \[2\]; need 1 .. 4 below 2"),
        ("parts", [], r"parts \[\]; need"),
        ("batch", torch.zeros(0, 4, dtype=torch.int32), r"batch .*need torch.int32 \[R >= "),
        ("block_size", 0, r"block_size 0; need 1"),
        ("max_query_rows", -1, r"max_query_rows -1; need 1"),
    ],
)  # fmt: skip
def test_resolve_says_what_is_wrong(name: str, value: object, words: str) -> None:
    arguments = resolve_arguments()
    arguments[name] = value
    if name == "parts":
        arguments["rows"] = torch.zeros(len(value), *arguments["rows"].shape[1:], dtype=torch.int32)
    with pytest.raises(ValueError, match=words):
        ops.resolve(**arguments)


def test_tensors_of_two_devices_are_named() -> None:
    check = ShapeCheck("resolve", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"got host .* on meta; need torch.int32 \[2\], contiguous, on cpu"):
        check("host", torch.zeros(2, dtype=torch.int32, device="meta"), torch.int32, (2,))


def test_resolve_needs_room_for_a_cold_step() -> None:
    arguments = resolve_arguments()
    for name in ("plan_host_row", "plan_slot"):
        arguments[name] = arguments[name][:, :7].contiguous()
    with pytest.raises(ValueError, match="got a plan for 7 misses a batch row; need 32"):
        ops.resolve(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("slot_of", torch.zeros(3, 128, dtype=torch.int32), "slot_of: got dtype Int; need Short"),
        ("clock", torch.zeros(2, dtype=torch.int32), "clock"),
        ("slot_of", torch.zeros(3, 127, dtype=torch.int16), "max_positions"),
        ("parts", [0, 1, 0, 1, 0], "parts: got 5"),
        ("policy", 2, "policy: got 2"),
    ],
)
def test_the_library_checks_too(name: str, value: object, words: str) -> None:
    arguments = resolve_arguments()
    arguments[name] = value
    with pytest.raises(RuntimeError, match=words):
        torch.ops.hisparse.resolve(*in_schema_order(arguments))


def test_fetch_and_pages_say_what_is_wrong() -> None:
    pool, host = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    blocks, offsets = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    layers = (offsets, torch.zeros(1, dtype=torch.int32), offsets, offsets)
    with pytest.raises(
        ValueError, match=r"write_pages: got page_blocks .*need torch.int32 \[engine_parts, n = 2\]"
    ):
        ops.write_pages(pool, host, blocks.view(2, 1), blocks, *layers, 8, 2, 16)
    with pytest.raises(ValueError, match=r"read_pages: got host torch.int8"):
        ops.read_pages(pool, host.to(torch.int8), blocks.view(1, 2), blocks, *layers, 8, 2, 16)
    with pytest.raises(
        ValueError, match=r"gather_pages: got staging .*need torch.uint8 \[n \* block_size >= 4, 8\]"
    ):
        ops.gather_pages(pool, host, host.view(8, 8)[:3], blocks, blocks, 0, 0, 8, 8, 2, 16)
    with pytest.raises(ValueError, match=r"forget: got first_slot .*need torch.int32 \[m = 2\]"):
        ops.forget(*vars(State.empty(Geometry())).values(), blocks, blocks[:1], blocks)


@pytest.mark.parametrize(
    ("words", "at", "value", "want"),
    [
        (torch.zeros(4, dtype=torch.int64), [0], [1], r"got words torch.int64 .*need torch.int32 \[n\]"),
        (torch.zeros(4, dtype=torch.int32), [0, 1], [1], r"got 2 indices for 1 values"),
        (torch.zeros(4, dtype=torch.int32), [0, 4], [1, 2], r"got 2 for index 4; need .* 0 .. 3"),
        (torch.zeros(4, dtype=torch.int32), [-1], [1], r"got 1 for index -1"),
        (torch.zeros(4, dtype=torch.int32), [0], [2**31], r"got 2147483648 for index 0; need an int32"),
    ],
)
def test_write_words_says_what_is_wrong(
    words: torch.Tensor, at: list[int], value: list[int], want: str
) -> None:
    with pytest.raises(ValueError, match=want):
        ops.write_words(words, at, value)
    assert not words.any()


def fetch_selected_arguments() -> dict[str, object]:
    zero, none = torch.zeros(1, dtype=torch.int32), torch.full((1, 2), -1, dtype=torch.int32)
    return {
        "group_host": torch.zeros(4, 16, dtype=torch.uint8),
        "pool": torch.zeros(64, dtype=torch.uint8),
        "layer_offset": torch.zeros(1, dtype=torch.int64),
        "layer_part": zero,
        "plan_host_row": none,
        "plan_slot": none,
        "plan_count": zero,
        "batch": torch.zeros(1, 4, dtype=torch.int32),
        "hot": zero.view(1, 1, 1),
        "topk": none,
        "query_start": torch.tensor([0, 1], dtype=torch.int32),
        "resident": none.view(1, 1, 2),
        "host": none,
        "slot_of": torch.full((1, 4), -1, dtype=torch.int16),
        "part": 0,
        "row_bytes": 16,
        "block_size": 2,
        "block_stride_bytes": 32,
        "skip_io": False,
    }


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("topk", torch.zeros(2, dtype=torch.int32), r"fetch_selected: got topk .*need torch.int32 \[T, K\]"),
        ("query_start", torch.zeros(3, dtype=torch.int32), r"got 2 batch rows in query_start; need at most"),
        ("query_start", torch.zeros(0, dtype=torch.int32), r"got query_start .*need torch.int32 \[1\]"),
        ("slot_of", torch.zeros(1, 4, dtype=torch.int32), r"slot_of torch.int32.*need torch.int16"),
        ("slot_of", torch.zeros(1, 3, dtype=torch.int16), r"got max_positions 3; need 4 = max_pages \*"),
        ("host", torch.zeros(1, 3, dtype=torch.int32), r"got host .*max_pages = 2\]"),
        ("batch", torch.zeros(1, 3, dtype=torch.int32), r"got batch .*\[R >= 1, 4\]"),
        ("batch", torch.zeros(5, dtype=torch.int32)[1:].view(1, 4), r"batch 4 bytes behind a multiple of 16"),
        ("hot", torch.zeros(1, 2, 1, dtype=torch.int32), r"got hot .*num_regions = 1"),
        ("group_host", torch.zeros(4, 8, dtype=torch.uint8), r"got group_host .*16\]"),
        ("part", 1, r"got part 1; need one below 1"),
        ("row_bytes", 0, r"row_bytes 0; need 1"),
    ],
)  # fmt: skip
def test_fetch_selected_says_what_is_wrong(name: str, value: object, words: str) -> None:
    arguments = fetch_selected_arguments() | {name: value}
    with pytest.raises(ValueError, match=words):
        ops.fetch_selected(**arguments)


def test_schemas_tell_what_is_written() -> None:
    fetched = fetch_selected_arguments()
    torch.library.opcheck(
        torch.ops.hisparse.fetch_selected.default,
        tuple(fetched[a.name] for a in torch.ops.hisparse.fetch_selected.default._schema.arguments),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.hisparse.resolve.default,
        tuple(in_schema_order(resolve_arguments())),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiles_without_a_graph_break() -> None:
    arguments, want = resolve_arguments(), resolve_arguments()
    torch.compile(ops.resolve, fullgraph=True, backend="aot_eager")(**arguments)
    ops.reference.resolve(**want)
    for name in ("rows", "counts", "slot_of", "key", "plan_slot"):
        assert torch.equal(arguments[name], want[name]), name


def test_loading_twice_is_loading_once() -> None:
    ops.load_library("cpu")
    assert ops.is_loaded("cpu")


def test_an_op_before_loading_is_an_error() -> None:
    code = (
        "import sys, torch\n"
        "from vllm_hisparse import ops\n"
        "assert not ops.is_loaded()\n"
        "empty = torch.zeros(0, dtype=torch.int32)\n"
        "try:\n"
        "    ops.forget(torch.zeros(1, 1, dtype=torch.int16), empty.view(1, 0), empty.view(1, 0),\n"
        "               torch.zeros(1, dtype=torch.int32), empty, empty, empty)\n"
        "except ops.LibraryError as error:\n"
        "    sys.exit('load_library' not in str(error))\n"
        "sys.exit(2)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_cuda_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(load.LibraryError, match=r"torch without CUDA.*vllm-hisparse 0.*torch 2.*CUDA none"):
        ops.load_library("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(load.LIBRARY_OF, "cuda", "_C_absent.abi3.so")
    with pytest.raises(load.LibraryError, match=r"_C_absent.abi3.so; need a wheel .*build_cuda.*CUDA 13.0"):
        ops.load_library("cuda")


def test_a_missing_symbol_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_path: str) -> None:
        raise OSError("could not load") from OSError("/x.so: undefined symbol: torch_from_the_future")

    library = tmp_path / "x.so"
    library.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(load.LIBRARY_OF, "cuda", str(library))
    monkeypatch.setattr(torch.ops, "load_library", refuse)
    with pytest.raises(load.LibraryError, match="lacks the symbol torch_from_the_future"):
        ops.load_library("cuda")


def test_a_torch_below_the_floor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    with pytest.raises(load.LibraryError, match=r"got torch 2.10.1\+cu130; need >= 2.11"):
        load._open("cpu")


def test_the_library_uses_the_stable_interface_only() -> None:
    library = Path(load.__file__).parents[1] / load.LIBRARY_OF["cpu"]
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout.split()
    torch_symbols = [name for name in symbols if "torch" in name or "c10" in name or "at6" in name]
    assert torch_symbols
    assert all(name.startswith(("aoti_torch_", "torch_")) for name in torch_symbols)


def test_results_do_not_depend_on_the_way_in() -> None:
    arguments, direct = resolve_arguments(), resolve_arguments()
    ops.resolve(**arguments)
    torch.ops.hisparse.resolve(*in_schema_order(direct))
    names = [f.name for f in fields(Outputs)]
    got, want = (Outputs(**{name: found[name] for name in names}) for found in (arguments, direct))
    assert_same(got, want)


def test_the_cuda_library_names_what_it_needs() -> None:
    """The loader looks for a symbol in libraries that are named; that torch has loaded them is not enough."""
    path = Path(load.__file__).parents[1] / load.LIBRARY_OF["cuda"]
    if not path.exists():
        pytest.skip("no CUDA library here: python setup.py build_cuda makes it")
    content = path.read_bytes()
    assert b"libtorch_cuda.so\0" in content
    assert b"libtorch_cpu.so\0" in content
