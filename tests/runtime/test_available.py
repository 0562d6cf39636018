"""Memory that is left, on made-up files of the kernel and of both versions of control groups."""

from pathlib import Path

import pytest

from vllm_hisparse.runtime.available import GroupLimit, available_bytes, group_limit, kernel_available

MEMINFO = "MemTotal: 90 kB\nMemAvailable:       8 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """(control groups, proc)."""
    proc = write(tmp_path / "proc", {"self/cgroup": own, "meminfo": MEMINFO})
    (tmp_path / "cgroup").mkdir()
    return write(tmp_path / "cgroup", files), proc


def test_version_2(tmp_path: Path) -> None:
    """The limit of a parent holds for its children; "max" is none."""
    files = {
        "pod/memory.max": "4096\n",
        "pod/memory.current": "1024\n",
        "pod/container/memory.max": "max\n",
        "pod/container/memory.current": "1000\n",
    }
    root, proc = machine(tmp_path, "0::/pod/container\n", files)
    assert group_limit(root, proc) == GroupLimit(4096, 1024)
    assert available_bytes(root, proc) == 3072
    assert group_limit(tmp_path / "nowhere", proc) is None
    assert available_bytes(tmp_path / "nowhere", proc) == 8 << 10


def test_the_group_that_leaves_least(tmp_path: Path) -> None:
    files = {
        "memory.max": "9000\n",
        "memory.current": "8500\n",
        "a/memory.max": "max\n",
        "a/memory.high": "5000\n",
        "a/memory.current": "4800\n",
        "a/b/memory.max": "4000\n",
        "a/b/memory.current": "100\n",
    }
    root, proc = machine(tmp_path, "0::/a/b\n", files)
    assert group_limit(root, proc) == GroupLimit(5000, 4800)


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root, proc = machine(tmp_path, "0::/\n", {"memory.max": "100\n", "memory.current": "120\n"})
    assert available_bytes(root, proc) == 0


def test_files_that_were_read_can_be_dropped(tmp_path: Path) -> None:
    """A server that has read its weights has not used its container up."""
    stat = "anon 500\nfile 3000\nactive_file 1000\ninactive_file 2000\nworkingset_activate_file 7\n"
    files = {"memory.max": "4000\n", "memory.current": "3500\n", "memory.stat": stat}
    root, proc = machine(tmp_path, "0::/\n", files)
    assert group_limit(root, proc) == GroupLimit(4000, 500)


@pytest.mark.parametrize("own", ["0::/../other\n", "0::/docker/0123\n", "0::/\n"])
def test_inside_a_container(tmp_path: Path, own: str) -> None:
    """The path of the group may be that of the host, or lead outside: the container's own root counts."""
    files = {"memory.max": "4096\n", "memory.current": "96\n"}
    root, proc = machine(tmp_path, own, files)
    assert group_limit(root, proc) == GroupLimit(4096, 96)


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "5\n",
        "memory/box/memory.limit_in_bytes": "8192\n",
        "memory/box/memory.usage_in_bytes": "1100\n",
        "memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 600\ntotal_active_file 400\n",
        "memory/box/inner/memory.limit_in_bytes": "9223372036854771712\n",
    }
    root, proc = machine(tmp_path, "5:cpu:/\n4:hugetlb,memory:/box/inner\n0::/\n", files)
    assert group_limit(root, proc) == GroupLimit(8192, 100)


def test_both_versions(tmp_path: Path) -> None:
    """Version 2 is mounted beside version 1, for other controllers or for memory."""
    files = {
        "memory/box/memory.limit_in_bytes": "8192\n",
        "memory/box/memory.usage_in_bytes": "8000\n",
        "unified/box/memory.max": "5000\n",
        "unified/box/memory.current": "10\n",
    }
    root, proc = machine(tmp_path, "4:memory:/box\n0::/box\n", files)
    assert group_limit(root, proc) == GroupLimit(8192, 8000)


def test_a_kernel_that_does_not_say(tmp_path: Path) -> None:
    assert kernel_available(tmp_path) == 0
    assert available_bytes(tmp_path, tmp_path) == 0
