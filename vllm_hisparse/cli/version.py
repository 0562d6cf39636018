"""`vllm-hisparse version`."""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import typer

__all__ = ["version"]

PACKAGES = ("vllm-hisparse", "vllm", "torch", "triton", "nixl")


def version() -> None:
    """Versions of this package and of what it works with."""
    for name in PACKAGES:
        typer.echo(f"{name} {_installed(name)}")
    typer.echo(f"python {platform.python_version()}")


def _installed(name: str) -> str:
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return "not installed"
