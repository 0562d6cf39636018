"""Entry points. vLLM calls them in every process it starts; with HiSparse not configured they change nothing
it does.

This module imports neither torch nor vLLM.
"""

__all__ = ["cpu_platform", "register"]


def register() -> None:
    """Entry point of group `vllm.general_plugins`. Idempotent.

    On a vLLM that the plugin does not fit, only asking for HiSparseConnector is an error.
    """
    from . import cpu
    from .compat.install import UnsupportedError, install, refuse

    cpu.register()
    try:
        install()
    except UnsupportedError as error:
        refuse(error)


def cpu_platform() -> str | None:
    """Entry point of group `vllm.platform_plugins`: the CPU platform on vLLM's CPU build, else None."""
    from . import cpu

    return cpu.platform_plugin()
