"""Calls back once modules have been imported, without importing them."""

import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(names: Sequence[str], call: Callable[[], object]) -> None:
    """`call()` once all modules of `names` have run: now, or at the end of the import that completes them.

    It comes before whoever imports the module gets to see it, and again if one of them runs again: after an
    import that has failed, or when it is reloaded. What it raises, the import raises.
    """
    missing = {name for name in names if name not in sys.modules}

    def note(name: str) -> None:
        missing.discard(name)
        if not missing:
            call()

    for name in names:
        _finder.add(name, partial(note, name))
    if not missing:
        call()


class _Finder(MetaPathFinder):
    """Leaves the finding to those behind it; of modules that are waited for it extends the loader."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Callable[[], None]]] = {}

    def add(self, name: str, call: Callable[[], None]) -> None:
        """`call()` after the code of module `name`, in the order of such calls."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._calls.setdefault(name, []).append(call)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The others' spec. None for a module that nobody waits for."""
        calls = self._calls.get(fullname)
        if calls is None:
            return None
        found = (other.find_spec(fullname, path, target) for other in sys.meta_path if other is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                for call in calls:
                    call()

            spec.loader = copy(spec.loader)  # some serve several modules
            spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


_finder = _Finder()
