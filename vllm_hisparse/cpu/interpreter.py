"""Triton kernels on CPU tensors, interpreted: what Model Runner V2 needs on a machine without a GPU.

vLLM's CPU build accepts Triton only when Triton has a backend named "cpu". The PyPI wheel has none, but its
interpreter needs no backend at all, so a stand-in that is never asked to compile is enough.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

VARIABLE = "TRITON_INTERPRET"


def enable() -> None:
    """Turns the interpreter on in this process and its children. Idempotent.

    Must run before vLLM imports `vllm.triton_utils`. `TRITON_INTERPRET=0` in the environment keeps it off
    (vLLM then runs without Triton), and a real "cpu" backend is left alone.
    """
    if find_spec("triton") is None:
        return  # the platform names the missing package once it sees a DSA model
    from triton.backends import backends

    if "cpu" in backends and not isinstance(backends["cpu"], SimpleNamespace):
        return
    if os.environ.setdefault(VARIABLE, "1") != "1":
        return
    backends.setdefault("cpu", SimpleNamespace(compiler=None, driver=_Driver))
    _reinterpret_language()
    _take_integer_masks()
    _patch_language_once()


class _Driver:
    """Answers vLLM's question, and fails as if there were no driver for whoever wants to compile."""

    def __init__(self) -> None:
        raise RuntimeError("Triton kernels are interpreted on the CPU: there is no driver")

    @staticmethod
    def is_active() -> bool:
        return True


def _reinterpret_language() -> None:
    """Turns Triton's own library functions, such as `tl.sum`, into interpreted ones.

    `import torch` may have imported Triton before the variable was set. The decorator decides at import, so
    those functions are compiled ones, which an interpreted kernel cannot call.
    """
    from triton.language.core import tensor
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, InterpretedFunction] = {}  # by identity: hashing a JITFunction parses its source
    modules = [m for name, m in sys.modules.items() if name.startswith("triton.language") and m is not None]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                function = interpreted.setdefault(id(value), InterpretedFunction(value.fn))
                setattr(module, name, function)
    for name, value in list(vars(tensor).items()):
        if id(value) in interpreted:
            setattr(tensor, name, _method(interpreted[id(value)]))


def _take_integer_masks() -> None:
    """Lets masks be integers: Triton types them int1 all the same, and vLLM's ngram kernels have one.

    The interpreter compares a scalar that `tl.max` returned into an int32, which its stores refuse.
    """
    from triton.runtime.interpreter import interpreter_builder

    builder = type(interpreter_builder)
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        method = getattr(builder, name)
        if not hasattr(method, "__wrapped__"):
            setattr(builder, name, _with_boolean_mask(method, position))


def _with_boolean_mask(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    """`method` of the interpreter's builder, whose mask is its argument number `position` after self."""

    @wraps(method)
    def wrapped(self: Any, *args: Any) -> Any:
        mask = args[position]
        mask.data = mask.data.astype(bool, copy=False)
        return method(self, *args)

    return wrapped


def _patch_language_once() -> None:
    """Leaves the interpreter's functions in `triton.language`, where nothing else looks for them.

    It puts them there at every launch and at every call of a Triton function from another, and takes them out
    after a launch, which is a third of the time that a small kernel takes.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if hasattr(patch, "__wrapped__"):
        return
    done: WeakSet[Callable[..., Any]] = WeakSet()  # functions whose view of the language is patched

    @wraps(patch)
    def patched(fn: Callable[..., Any]) -> Any:
        if fn not in done:
            patch(fn)
            done.add(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patched


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, which Python binds to its object."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method
