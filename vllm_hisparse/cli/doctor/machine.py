"""What the checks look at, as plain values: tests make their own, `probes.probe` reads the real ones."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """One CUDA device. PCIe generations and widths as the driver reports them, None if it does not."""

    name: str
    capability: tuple[int, int]
    link_generation: int | None = None  # the most that card and slot reach together; an idle link runs slower
    link_width: int | None = None
    max_link_width: int | None = None
    copy_gb_per_s: float | None = None  # measured, pinned host memory to device, by the copy engine
    fetch_gb_per_s: float | None = None  # the same in scattered rows, by our kernel


@dataclass(frozen=True)
class NumaNode:
    """Memory of one NUMA node in bytes."""

    node_id: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """One machine, one environment, and the server that is planned on it."""

    # software
    vllm_version: str | None = None  # None: not installed
    torch_version: str | None = None
    torch_cuda: str | None = None  # CUDA that torch was built for
    driver_version: str | None = None  # None: there is no NVIDIA driver
    driver_cuda: tuple[int, int] | None = None  # newest CUDA the driver serves
    library_errors: dict[str, str | None] = field(default_factory=dict)  # device type -> why it fails to load
    seam_errors: dict[str, str | None] = field(default_factory=dict)  # rebound symbol -> what does not fit
    connector_module: str | None = None  # where vLLM finds HiSparseConnector
    connector_error: str | None = None
    platforms: tuple[str, ...] = ()  # platform plugins that claim this machine
    vllm_plugins: str | None = None  # the variable VLLM_PLUGINS
    # hardware
    gpus: tuple[Gpu, ...] = ()
    memlock_bytes: int | None = None  # None: no limit
    available_bytes: int = 0  # memory that programs can still get
    cgroup_limit_bytes: int | None = None  # None: no limit
    cgroup_used_bytes: int = 0
    numa: tuple[NumaNode, ...] = ()
    # what is planned
    host_pool_bytes: int | None = None  # of one replica, shared by its ranks
    num_replicas: int = 1

    @property
    def planned_bytes(self) -> int | None:
        """Host memory of all replicas on this machine."""
        return None if self.host_pool_bytes is None else self.host_pool_bytes * self.num_replicas
