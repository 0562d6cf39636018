"""The checks: each judges a `Machine` and looks at nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from vllm_hisparse.compat.ledger import MIN_VERSION, NEXT_UNSUPPORTED_VERSION
from vllm_hisparse.config import CONNECTOR, GIB, MIB

from .machine import Machine

TORCH_FLOOR = (2, 11)  # stable ABI of the ops; a test holds it to ops.load
MIN_CAPABILITY = (9, 0)  # what the CUDA library is compiled for, see setup.py
# Below these, reading the host dominates decoding: measured on PCIe Gen5 x16, 55 GB/s.
SLOW_GENERATION = 4
SLOW_WIDTH = 16
SLOW_COPY_GB_PER_S = 20.0
HOST_HEADROOM = 0.9  # share of the available host memory that pools may take
PASS_GPUS = "pass the GPUs to the container (--gpus all), and look at CUDA_VISIBLE_DEVICES and nvidia-smi"
OUR_PLATFORM = "hisparse_cpu"
OUR_GENERAL_PLUGIN = "hisparse"


class Status(Enum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty unless something is to be done."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def vllm_version(machine: Machine) -> Finding:
    """vLLM is installed in a version that the plugin binds to."""
    low, high = (".".join(map(str, v)) for v in (MIN_VERSION, NEXT_UNSUPPORTED_VERSION))
    version = machine.vllm_version
    if version is None:
        return Finding("vLLM", Status.FAIL, "not installed", f'pip install "vllm>={low},<{high}"')
    if MIN_VERSION <= _release(version) < NEXT_UNSUPPORTED_VERSION:
        return Finding("vLLM", Status.OK, f"{version}, supported: >= {low}, < {high}")
    return Finding(
        "vLLM", Status.FAIL, f"{version}, need >= {low}, < {high}", f'pip install "vllm>={low},<{high}"'
    )


def torch_version(machine: Machine) -> Finding:
    """torch has the stable ABI that the compiled ops are built on."""
    need, version = ".".join(map(str, TORCH_FLOOR)), machine.torch_version
    if version is None:
        return Finding("torch", Status.FAIL, "not installed", "install vLLM, which brings its torch")
    if _release(version) < TORCH_FLOOR:
        return Finding("torch", Status.FAIL, f"{version}, need >= {need}", f'pip install "torch>={need}"')
    return Finding("torch", Status.OK, f"{version}, CUDA {machine.torch_cuda or 'none'}")


def cuda_driver(machine: Machine) -> Finding:
    """The driver serves the CUDA that torch was built for (it has to know its major version), and torch sees
    its devices.
    """
    name = "CUDA driver"
    driver = f"driver {machine.driver_version or 'of unknown version'}"
    if machine.driver_cuda is None and not machine.gpus:
        if machine.torch_cuda is None or machine.driver_version is None:
            return Finding(name, Status.SKIPPED, "no CUDA device")
        return Finding(name, Status.FAIL, f"{driver}, but no libcuda.so.1 and no device", PASS_GPUS)
    if machine.torch_cuda is None:
        remedy = "install a CUDA build of torch and vLLM"
        return Finding(name, Status.FAIL, f"{driver}, but torch was built without CUDA", remedy)
    if machine.driver_cuda is None:
        return Finding(name, Status.WARN, f"{driver}: the CUDA it serves cannot be read", "run nvidia-smi")
    needed, served = _release(machine.torch_cuda), machine.driver_cuda
    text = f"{driver} serves CUDA {served[0]}.{served[1]}, torch has {machine.torch_cuda}"
    if served[0] < needed[0]:
        return Finding(name, Status.FAIL, text, "install a newer driver, or a torch for an older CUDA")
    if not machine.gpus:
        return Finding(name, Status.FAIL, f"{text}, but torch sees no device", PASS_GPUS)
    return Finding(name, Status.OK, text)


def gpu_generation(machine: Machine) -> Finding:
    """The CUDA library has code for every device."""
    if not machine.gpus:
        return Finding("GPU", Status.SKIPPED, "no CUDA device")
    text = ", ".join(
        sorted({f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in machine.gpus})
    )
    if min(gpu.capability for gpu in machine.gpus) < MIN_CAPABILITY:
        return Finding(
            "GPU",
            Status.FAIL,
            text,
            "use Hopper or newer: the library and the sparse attention kernels need sm_90",
        )
    return Finding("GPU", Status.OK, f"{len(machine.gpus)} x {text}")


def cpu_library(machine: Machine) -> Finding:
    """The library that defines the ops loads."""
    return _library(machine, "cpu", "reinstall vllm-hisparse: its wheel has the library")


def cuda_library(machine: Machine) -> Finding:
    """The library with the kernels loads."""
    if machine.torch_cuda is None and not machine.gpus:
        return Finding("CUDA library", Status.SKIPPED, "torch without CUDA, and no CUDA device")
    return _library(machine, "cuda", "install a wheel that has it, or run `python setup.py build_cuda`")


def _library(machine: Machine, device_type: str, remedy: str) -> Finding:
    name = f"{device_type.upper()} library"
    if device_type not in machine.library_errors:
        return Finding(name, Status.SKIPPED, "torch is missing")
    error = machine.library_errors[device_type]
    return Finding(name, Status.FAIL, error, remedy) if error else Finding(name, Status.OK, "loads")


def ledger(machine: Machine) -> Finding:
    """Every vLLM symbol that is rebound has the signature that the ledger says."""
    if not machine.seam_errors:
        return Finding("vLLM internals", Status.SKIPPED, "no supported vLLM")
    wrong = [error for error in machine.seam_errors.values() if error]
    if wrong:
        remedy = "install the released vLLM of that version; a patched one may not fit"
        return Finding("vLLM internals", Status.FAIL, "; ".join(wrong), remedy)
    return Finding("vLLM internals", Status.OK, f"all {len(machine.seam_errors)} symbols are as expected")


def connector(machine: Machine) -> Finding:
    """HiSparseConnector is ours, not vLLM's of that name."""
    if machine.vllm_plugins is not None and OUR_GENERAL_PLUGIN not in machine.vllm_plugins.split(","):
        return Finding(
            CONNECTOR,
            Status.FAIL,
            f"VLLM_PLUGINS={machine.vllm_plugins} leaves this plugin out",
            f"add {OUR_GENERAL_PLUGIN} to VLLM_PLUGINS, or unset it",
        )
    if machine.connector_error is not None:
        return Finding(CONNECTOR, Status.FAIL, machine.connector_error, "see the other failures")
    if machine.connector_module is None:
        return Finding(CONNECTOR, Status.SKIPPED, "no vLLM")
    if not machine.connector_module.startswith("vllm_hisparse."):
        return Finding(
            CONNECTOR,
            Status.FAIL,
            f"taken by {machine.connector_module}",
            "reinstall vllm-hisparse, and uninstall what else registers that name",
        )
    return Finding(CONNECTOR, Status.OK, f"is {machine.connector_module}")


def platform(machine: Machine) -> Finding:
    """At most one plugin claims the platform; vLLM refuses to start with two."""
    claims, others = machine.platforms, [name for name in machine.platforms if name != OUR_PLATFORM]
    if len(claims) > 1:
        return Finding(
            "platform",
            Status.FAIL,
            f"claimed by {', '.join(claims)}",
            f"uninstall one, or name the plugins to load in VLLM_PLUGINS ({OUR_GENERAL_PLUGIN} among them)",
        )
    if others:
        return Finding(
            "platform",
            Status.WARN,
            f"{others[0]}, which HiSparse was never run on",
            "expect no support there",
        )
    return Finding("platform", Status.OK, claims[0] if claims else "vLLM's own")


def pinned_memory(machine: Machine) -> Finding:
    """The limit of locked memory leaves room for the host pools."""
    if not machine.gpus:
        return Finding("pinned memory", Status.SKIPPED, "no CUDA device: nothing is pinned")
    if machine.memlock_bytes is None:
        return Finding("pinned memory", Status.OK, "no limit (ulimit -l)")
    text = f"limit of {machine.memlock_bytes / MIB:,.1f} MiB (ulimit -l)"
    needed = machine.host_pool_bytes
    if needed is not None and machine.memlock_bytes >= needed:
        return Finding("pinned memory", Status.OK, f"{text} for a pool of {needed / GIB:g} GiB")
    return Finding(
        "pinned memory",
        Status.WARN,
        f"{text}: CUDA may pin beyond it, RDMA (NIXL) may not",
        "ulimit -l unlimited; in a container --ulimit memlock=-1",
    )


def host_memory(machine: Machine) -> Finding:
    """The pools of all replicas fit in memory, and in the container's share of it."""
    available, limit = machine.available_bytes, machine.cgroup_limit_bytes
    source = "available"
    if limit is not None and limit - machine.cgroup_used_bytes < available:
        available, source = max(0, limit - machine.cgroup_used_bytes), "left in the container"
    text = f"{available / GIB:,.1f} GiB {source}"
    planned = machine.planned_bytes
    if planned is None:
        return Finding("host memory", Status.OK, f"{text}; name a pool with --host-pool-gib to compare")
    plural = "s" if machine.num_replicas > 1 else ""
    text += f", {planned / GIB:,.1f} planned in {machine.num_replicas} pool{plural}"
    most = HOST_HEADROOM * available / machine.num_replicas / GIB
    remedy = f"lower host_pool_gib to {most:.1f}, or give the machine or container more memory"
    if planned > available:
        return Finding("host memory", Status.FAIL, text, remedy)
    if planned > HOST_HEADROOM * available:
        return Finding("host memory", Status.WARN, f"{text}: little is left for anything else", remedy)
    return Finding("host memory", Status.OK, text)


def numa(machine: Machine) -> Finding:
    """A pool fits in one NUMA node."""
    if not machine.numa:
        return Finding("NUMA", Status.SKIPPED, "the system does not say")
    free = ", ".join(f"node {node.node_id}: {node.free_bytes / GIB:,.1f} GiB free" for node in machine.numa)
    if len(machine.numa) == 1 or machine.host_pool_bytes is None:
        return Finding("NUMA", Status.OK, free)
    if machine.host_pool_bytes > max(node.free_bytes for node in machine.numa):
        return Finding(
            "NUMA",
            Status.WARN,
            f"{free}; a pool of {machine.host_pool_bytes / GIB:,.1f} GiB spans nodes",
            "reads from the far node are slower: a smaller pool, or free memory of the GPU's node",
        )
    return Finding("NUMA", Status.OK, free)


def pcie_link(machine: Machine) -> Finding:
    """The link of every GPU is as wide and fast as it should be."""
    if not machine.gpus:
        return Finding("PCIe link", Status.SKIPPED, "no CUDA device")
    known = [gpu for gpu in machine.gpus if gpu.link_generation is not None and gpu.link_width is not None]
    if not known:
        return Finding("PCIe link", Status.SKIPPED, "the driver does not say")
    worst = min(known, key=lambda gpu: (gpu.link_generation or 0, gpu.link_width or 0))
    text = f"Gen{worst.link_generation} x{worst.link_width}"
    narrow = (worst.link_width or 0) < (worst.max_link_width or SLOW_WIDTH)
    if narrow or (worst.link_generation or 0) < SLOW_GENERATION:
        return Finding(
            "PCIe link", Status.WARN, text, "misses cost more: check the slot and risers, raise max_hot_rows"
        )
    return Finding("PCIe link", Status.OK, text)


def host_reads(machine: Machine) -> Finding:
    """What the link measures, from pinned host memory to the device: as a whole, and in rows."""
    name = "host reads"
    if not machine.gpus:
        return Finding(name, Status.SKIPPED, "no CUDA device")
    measured = [(gpu.copy_gb_per_s, "by the copy engine") for gpu in machine.gpus]
    measured += [(gpu.fetch_gb_per_s, "in rows by our kernel") for gpu in machine.gpus]
    slowest: dict[str, float] = {}
    for speed, how in measured:
        if speed is not None:
            slowest[how] = min(speed, slowest.get(how, speed))
    if not slowest:
        return Finding(name, Status.SKIPPED, "not measured")
    text = ", ".join(f"{speed:.1f} GB/s {how}" for how, speed in slowest.items())
    if len(machine.gpus) > 1:
        text += f"; on the slowest of {len(machine.gpus)} GPUs"
    if min(slowest.values()) < SLOW_COPY_GB_PER_S:
        return Finding(name, Status.WARN, text, "misses cost more: check the PCIe link and NUMA binding")
    return Finding(name, Status.OK, text)


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    vllm_version,
    torch_version,
    cuda_driver,
    gpu_generation,
    cpu_library,
    cuda_library,
    ledger,
    connector,
    platform,
    pinned_memory,
    host_memory,
    numa,
    pcie_link,
    host_reads,
)


def check_all(machine: Machine) -> list[Finding]:
    """Every check, in the order in which a reader should mend things."""
    return [check(machine) for check in CHECKS]


def _release(version: str) -> tuple[int, int]:
    """(major, minor) of a version; (0, 0) if there is none in it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
