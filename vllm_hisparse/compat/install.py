"""Puts our objects behind vLLM's HiSparse mode: once a process, all or nothing."""

import importlib
import inspect
from typing import Any

from .ledger import LEDGER, MIN_VERSION, NEXT_UNSUPPORTED_VERSION, Seam

__all__ = ["UnsupportedError", "check_seam", "check_version", "install", "refuse", "seam_place"]

CONNECTOR = "HiSparseConnector"
NIXL_CONNECTOR = "HiSparseNixlConnector"
_installed = False


class UnsupportedError(RuntimeError):
    """This vLLM is not one that the plugin binds to."""


def install() -> None:
    """Register connector, specs and managers, and rebind the symbols of the ledger. Idempotent.

    Raises UnsupportedError, and then nothing has been rebound, if the vLLM version is not supported or a
    symbol is not what the ledger says.
    """
    global _installed
    if _installed:
        return
    version = check_version()
    rebindings = [(*seam_place(seam, version), check_seam(seam, version)) for seam in LEDGER]
    _register()
    for owner, name, replacement in rebindings:
        setattr(owner, name, replacement)
    _installed = True


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
    """Our replacement for `seam`, once both signatures are what the ledger says.

    Raises UnsupportedError otherwise.
    """
    theirs = getattr(*seam_place(seam, version), None)
    _check_signature(seam, version, "vLLM's", theirs)  # first: ours may build on it
    module, attribute = seam.replacement.split(":")
    ours = getattr(importlib.import_module(f"vllm_hisparse.{module}"), attribute)
    _check_signature(seam, version, "our", ours)
    return ours


def seam_place(seam: Seam, version: tuple[int, int]) -> tuple[Any, str]:
    """(module or class, name in it) of what `seam` replaces; the class is None if vLLM has none such."""
    module = importlib.import_module(seam.modules[version])
    owner, _, name = seam.symbol.rpartition(".")
    return (getattr(module, owner, None) if owner else module), name


def _check_signature(seam: Seam, version: tuple[int, int], owner: str, function: Any) -> None:
    got = None if function is None else tuple(inspect.signature(function).parameters)
    if got != seam.parameters:
        import vllm

        raise UnsupportedError(
            f"vLLM {vllm.__version__}: {owner} {seam.modules[version]}.{seam.symbol} takes {got}; "
            f"vllm-hisparse needs {seam.parameters} because {seam.why}"
        )


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_hisparse.planning.specs import SOURCE_ROLE, ResidentSpec
    from vllm_hisparse.scheduler.managers import ResidentManager, SourceManager

    # vLLM's own entry of that name goes first: register_connector refuses a name that is taken.
    KVConnectorFactory._registry.pop(CONNECTOR, None)
    KVConnectorFactory.register_connector(CONNECTOR, "vllm_hisparse.connector", CONNECTOR)
    KVConnectorFactory.register_connector(NIXL_CONNECTOR, "vllm_hisparse.nixl_connector", NIXL_CONNECTOR)
    # vLLM fills its registry on first use, and only if it is still empty: let it do so before ours are added.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ResidentSpec, ResidentManager, uniform_type_base_spec=ResidentSpec)
    KVCacheSpecRegistry.register_role_manager(SOURCE_ROLE, SourceManager)
