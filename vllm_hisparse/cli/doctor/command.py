"""`vllm-hisparse doctor`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

import typer

from .checks import Finding, Status, check_all
from .probes import probe

__all__ = ["doctor"]

COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red", Status.SKIPPED: "bright_black"}
NAME_WIDTH = 18


def doctor(
    host_pool_gib: Annotated[
        float | None, typer.Option(help="The pool to check host memory against.", min=0)
    ] = None,
    dp: Annotated[
        int, typer.Option(help="Data-parallel replicas on this machine, each with a pool.", min=1)
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine and this environment; every problem is shown with what to do about it.

    Exits with 1 if a check fails.
    """
    findings = check_all(probe(host_pool_gib, dp))
    failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": [_as_dict(f) for f in findings]}, indent=1))
    else:
        for finding in findings:
            _print(finding)
        counts = Counter(finding.status.value for finding in findings)
        typer.echo(
            ", ".join(f"{counts[status.value]} {status.value}" for status in Status if counts[status.value])
        )
    raise typer.Exit(1 if failed else 0)


def _print(finding: Finding) -> None:
    status = typer.style(f"{finding.status.value:8}", fg=COLOURS[finding.status])
    typer.echo(f"{status}{finding.check:{NAME_WIDTH}}{finding.detail}")
    if finding.remedy:
        typer.echo(f"{'':{8 + NAME_WIDTH}}-> {finding.remedy}")


def _as_dict(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "status": finding.status.value,
        "detail": finding.detail,
        "remedy": finding.remedy,
    }
