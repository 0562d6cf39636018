"""Callbacks at imports, on modules of our own."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_hisparse.compat import import_hook
from vllm_hisparse.compat.import_hook import when_imported

FIRST, SECOND = "hooked_first", "hooked_second"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules; the second imports the first in the middle of its code."""
    before = list(sys.meta_path)
    monkeypatch.setattr(import_hook, "_finder", import_hook._Finder())
    (tmp_path / f"{FIRST}.py").write_text("value = 1\n")
    (tmp_path / f"{SECOND}.py").write_text(f"import {FIRST}\nvalue = {FIRST}.value\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.meta_path[:] = before
    for name in (FIRST, SECOND):
        sys.modules.pop(name, None)


def test_nothing_is_imported_for_it() -> None:
    when_imported([FIRST], lambda: None)
    assert FIRST not in sys.modules


def test_before_the_importer_sees_the_module() -> None:
    when_imported([FIRST], lambda: setattr(sys.modules[FIRST], "value", 2))
    assert importlib.import_module(SECOND).value == 2


def test_at_once_if_it_is_there() -> None:
    importlib.import_module(FIRST)
    called = []
    when_imported([FIRST], lambda: called.append(1))
    assert called == [1]


@pytest.mark.parametrize("order", [[FIRST, SECOND], [SECOND], [SECOND, FIRST]])
def test_of_two_the_last_to_end(order: list[str]) -> None:
    called: list[bool] = []
    when_imported([FIRST, SECOND], lambda: called.append(hasattr(sys.modules[SECOND], "value")))
    for name in order:
        importlib.import_module(name)
    assert called == [True]


def test_again_for_a_module_that_runs_again() -> None:
    importlib.import_module(FIRST)
    when_imported([FIRST], lambda: setattr(sys.modules[FIRST], "value", 2))
    assert importlib.reload(sys.modules[FIRST]).value == 2


def test_an_error_is_the_imports() -> None:
    def fail() -> None:
        raise RuntimeError("does not fit")

    when_imported([FIRST], fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not fit"):
            importlib.import_module(FIRST)
        assert FIRST not in sys.modules


def test_a_module_that_does_not_exist() -> None:
    when_imported(["hooked_nowhere"], lambda: None)
    with pytest.raises(ModuleNotFoundError, match="hooked_nowhere"):
        importlib.import_module("hooked_nowhere")
