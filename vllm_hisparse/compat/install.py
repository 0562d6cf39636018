"""Puts our objects behind vLLM's HiSparse mode: once a process.

A symbol is rebound when the module that has it is imported. A process imports nothing for our sake: an API
server needs none of these modules, and on some machines they take seconds.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .import_hook import when_imported
from .ledger import LEDGER, MIN_VERSION, NEXT_UNSUPPORTED_VERSION, Seam

__all__ = ["UnsupportedError", "check_seam", "check_version", "install", "refuse", "seam_place"]

CONNECTOR = "HiSparseConnector"
CONNECTOR_MODULE = "vllm_hisparse.connector"
NIXL_CONNECTOR = "HiSparseNixlConnector"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"  # nobody looks up a manager before it is imported
OUR_MANAGERS = "vllm_hisparse.scheduler.managers"
_installed = False


class UnsupportedError(RuntimeError):
    """This vLLM is not one that the plugin binds to."""


def install() -> None:
    """Register the connectors, and have specs and managers registered and the symbols of the ledger rebound
    as soon as their modules are imported: those that are, now. Idempotent.

    Raises UnsupportedError, and then nothing has been rebound, if the vLLM version is not supported, a module
    is missing or a symbol of an imported one is not what the ledger says. Of modules that are imported later
    see `_or_refuse`.
    """
    global _installed
    if _installed:
        return
    version = check_version()
    for seam in LEDGER:
        _check_module(seam, version)
        if seam.modules[version] in sys.modules:
            check_seam(seam, version)
    _register_connectors()
    for seam in LEDGER:
        _bind(
            seam.modules[version],
            _our_module(seam),
            before=partial(_check_theirs, seam, version),
            bind=partial(_rebind, seam, version),
        )
    _bind(MANAGERS, OUR_MANAGERS, before=lambda: None, bind=_register_specs)
    _installed = True


def _bind(theirs: str, ours: str, before: Callable[[], None], bind: Callable[[], None]) -> None:
    """Once vLLM's module `theirs` is imported: `before`, then import `ours`; `bind` when both have run.

    Ours may also be imported first, and then imports theirs in the middle of its own code.
    """

    def load() -> None:
        before()
        importlib.import_module(ours)

    when_imported([theirs], partial(_or_refuse, load))
    when_imported([theirs, ours], partial(_or_refuse, bind))


def _or_refuse(step: Callable[[], None]) -> None:
    """`step`. If it raises UnsupportedError: so does this where HiSparse is asked for, at the import that
    finds the reason. Elsewhere asking for it is an error from now on, and nothing else.
    """
    try:
        step()
    except UnsupportedError as error:
        refuse(error)
        if _is_asked_for():
            raise


def _is_asked_for() -> bool:
    """Whether this process has an engine with HiSparse, or is about to have one."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()  # a worker imports its model under it
    has_flag = config is not None and config.attention_config.hisparse_config is not None
    return has_flag or CONNECTOR_MODULE in sys.modules


def refuse(error: UnsupportedError) -> None:
    """Make HiSparseConnector raise `error`; vLLM without it is left as it is.

    vLLM's own connector does not take its place: whoever installed this package did not ask for another one.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def load() -> Any:
        raise error

    KVConnectorFactory._registry[CONNECTOR] = load


def check_version() -> tuple[int, int]:
    """vLLM's (major, minor). Raises UnsupportedError if the plugin does not support it."""
    import vllm
    from vllm import version as vllm_version

    release = tuple(int(part) for part in vllm_version.__version_tuple__[:2])
    if not MIN_VERSION <= release < NEXT_UNSUPPORTED_VERSION:
        low, high = (".".join(map(str, v)) for v in (MIN_VERSION, NEXT_UNSUPPORTED_VERSION))
        raise UnsupportedError(
            f"got vLLM {vllm.__version__}; vllm-hisparse needs >= {low}, < {high} because it binds to "
            "internals that other versions do not have: install a supported vLLM, or uninstall vllm-hisparse"
        )
    return release[0], release[1]


def check_seam(seam: Seam, version: tuple[int, int]) -> Any:
    """Our replacement for `seam`, once both signatures are what the ledger says. Imports both modules.

    Raises UnsupportedError otherwise.
    """
    _check_theirs(seam, version)  # first: ours may build on it
    ours = getattr(importlib.import_module(_our_module(seam)), seam.replacement.split(":")[1])
    _check_signature(seam, version, "our", ours)
    return ours


def seam_place(seam: Seam, version: tuple[int, int]) -> tuple[Any, str]:
    """(module or class, name in it) of what `seam` replaces; the class is None if vLLM has none such."""
    module = importlib.import_module(seam.modules[version])
    owner, _, name = seam.symbol.rpartition(".")
    return (getattr(module, owner, None) if owner else module), name


def _our_module(seam: Seam) -> str:
    return f"vllm_hisparse.{seam.replacement.split(':')[0]}"


def _rebind(seam: Seam, version: tuple[int, int]) -> None:
    ours = check_seam(seam, version)
    setattr(*seam_place(seam, version), ours)


def _check_theirs(seam: Seam, version: tuple[int, int]) -> None:
    _check_signature(seam, version, "vLLM's", getattr(*seam_place(seam, version), None))


def _check_module(seam: Seam, version: tuple[int, int]) -> None:
    """That vLLM has the module, without importing it or its parents: one that it lacks is never imported."""
    import vllm

    module = seam.modules[version]
    folder = Path(vllm.__path__[0]).joinpath(*module.split(".")[1:-1])
    if module not in sys.modules and PathFinder.find_spec(module, [str(folder)]) is None:
        raise UnsupportedError(
            f"got vLLM {vllm.__version__} without {module}; vllm-hisparse needs {seam.symbol} in it because "
            f"{seam.why}"
        )


def _check_signature(seam: Seam, version: tuple[int, int], owner: str, function: Any) -> None:
    got = None if function is None else tuple(inspect.signature(function).parameters)
    if got != seam.parameters:
        import vllm

        raise UnsupportedError(
            f"vLLM {vllm.__version__}: {owner} {seam.modules[version]}.{seam.symbol} takes {got}; "
            f"vllm-hisparse needs {seam.parameters} because {seam.why}"
        )


def _register_connectors() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM's own entry of that name goes first: register_connector refuses a name that is taken.
    KVConnectorFactory._registry.pop(CONNECTOR, None)
    KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    KVConnectorFactory.register_connector(NIXL_CONNECTOR, "vllm_hisparse.nixl_connector", NIXL_CONNECTOR)


def _register_specs() -> None:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_hisparse.planning.specs import SOURCE_ROLE, ResidentSpec
    from vllm_hisparse.scheduler.managers import ResidentManager, SourceManager

    # vLLM fills its registry on first use, and only if it is still empty: let it do so before ours are added.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ResidentSpec, ResidentManager, uniform_type_base_spec=ResidentSpec)
    KVCacheSpecRegistry.register_role_manager(SOURCE_ROLE, SourceManager)
