"""Memory that this process can still get: what the kernel reports, and what its control groups leave.

A limit holds for everything below its group, so the groups from the process's own up to the root are asked,
of both versions of control groups. Files that the group has read count as used there, though the kernel drops
them when memory is asked for: after a server has read its weights that is most of what a container "uses".
"""

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["GroupLimit", "available_bytes", "group_limit", "kernel_available"]

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # version 1 says "none" by a figure near 2^63


class GroupLimit(NamedTuple):
    """The control group that leaves least."""

    limit_bytes: int
    used_bytes: int  # without files that can be dropped

    @property
    def left_bytes(self) -> int:
        """Bytes that processes below the group can still get."""
        return max(0, self.limit_bytes - self.used_bytes)


class _Version(NamedTuple):
    """Names of one version of control groups."""

    limits: tuple[str, ...]
    used: str
    droppable: tuple[str, ...]  # lines of memory.stat


VERSION_2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
VERSION_1 = _Version(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)


def available_bytes(root: Path = CGROUP, proc: Path = PROC) -> int:
    """Bytes that this process can still get; 0 if the kernel does not say."""
    available, group = kernel_available(proc), group_limit(root, proc)
    return available if group is None else min(available, group.left_bytes)


def kernel_available(proc: Path = PROC) -> int:
    """MemAvailable in bytes; 0 if unknown."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(proc / "meminfo"))
    return int(found[1]) << 10 if found else 0


def group_limit(root: Path = CGROUP, proc: Path = PROC) -> GroupLimit | None:
    """Of the limits on this process's control group and on those above it, the one that leaves least."""
    found: list[GroupLimit] = []
    for controllers, path in re.findall(
        r"^\d+:([^:]*):/*(.*)$", _read(proc / "self" / "cgroup"), re.MULTILINE
    ):
        if controllers == "":
            # Beside version 1 the tree of version 2 is mounted one level down.
            for base in (root, root / "unified"):
                found += _limits(base, path, VERSION_2)
        elif "memory" in controllers.split(","):
            found += _limits(root / "memory", path, VERSION_1)
    return min(found, key=lambda group: group.left_bytes, default=None)


def _limits(base: Path, path: str, version: _Version) -> list[GroupLimit]:
    """Limits from a group up to the root of its tree. Inside a container the path may not exist there."""
    here = base / path
    folders = [here, *(parent for parent in here.parents if parent.is_relative_to(base))]
    found = []
    for folder in folders:
        limits = [limit for name in version.limits if (limit := _number(folder / name)) is not None]
        if limits and min(limits) < NO_LIMIT:
            stat = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / "memory.stat"), re.MULTILINE))
            droppable = sum(int(stat.get(name, 0)) for name in version.droppable)
            found.append(GroupLimit(min(limits), max(0, (_number(folder / version.used) or 0) - droppable)))
    return found


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
