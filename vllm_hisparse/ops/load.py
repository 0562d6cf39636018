"""Loads the compiled ops, once a process and only when told to: the worker calls `load_library` first of all.

Importing `vllm_hisparse.ops` loads nothing: tools and the scheduler process work without the libraries.
"""

import re
from pathlib import Path
from typing import Literal

import torch

from vllm_hisparse import __version__
from vllm_hisparse.ops import fake

TORCH_FLOOR = (2, 11)
LIBRARY_OF = {"cpu": "_C_cpu.abi3.so", "cuda": "_C_cuda.abi3.so"}

_loaded: set[str] = set()


class LibraryError(RuntimeError):
    """A library is missing or does not fit this torch. There is no fallback to another device."""


def load_library(device_type: Literal["cpu", "cuda"]) -> None:
    """Makes the ops available for tensors of `device_type`. A second call does nothing.

    The CPU library defines the ops, so it is always loaded first; on its own it serves CPU tensors only.

    Raises LibraryError, which names the wheel, torch, CUDA and the file or symbol that is missing.
    """
    if device_type not in LIBRARY_OF:
        raise ValueError(f"got device type {device_type!r}; need one of {sorted(LIBRARY_OF)}")
    if "cpu" not in _loaded:
        _open("cpu")
        fake.register()
    if device_type not in _loaded:
        _open(device_type)


def is_loaded(device_type: Literal["cpu", "cuda"] = "cpu") -> bool:
    return device_type in _loaded


def require_loaded() -> None:
    """Raises LibraryError unless `load_library` has been called."""
    if "cpu" not in _loaded:
        raise LibraryError("got a call of an op before load_library(); need it once, from the worker")


def _open(device_type: str) -> None:
    path = Path(__file__).parents[1] / LIBRARY_OF[device_type]
    found = f"vllm-hisparse {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < TORCH_FLOOR:
        raise LibraryError(
            f"got torch {torch.__version__}; need >= 2.11 for the stable ABI of the ops ({found})"
        )
    if device_type == "cuda" and torch.version.cuda is None:
        raise LibraryError(
            f"got a torch without CUDA; need a CUDA build of torch to load {path.name} ({found})"
        )
    if not path.exists():
        raise LibraryError(
            f"got no {path}; need a wheel that has it, or `python setup.py build_cuda` in a source tree, "
            f"because nothing else implements the ops on {device_type} ({found})"
        )
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise LibraryError(f"got {path} that does not load: {_cause(error)} ({found})") from error
    _loaded.add(device_type)


def _cause(error: OSError) -> str:
    """The loader's own words, which torch chains below its error; a missing symbol is put first."""
    words = str(error.__cause__ or error)
    symbol = re.search(r"undefined symbol: (\S+)", words)
    return f"this torch lacks the symbol {symbol[1]}" if symbol else words
