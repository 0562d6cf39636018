"""`vllm-hisparse doctor`: every outcome of every check on made-up machines, the probes on made-up files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from vllm_hisparse.cli.doctor import checks, command, probes, speed
from vllm_hisparse.cli.doctor.checks import CHECKS, Finding, Status, check_all
from vllm_hisparse.cli.doctor.machine import Gpu, Machine, NumaNode
from vllm_hisparse.config import GIB, MIB
from vllm_hisparse.ops.load import TORCH_FLOOR, load_library

GPU = Gpu(
    "NVIDIA H200",
    (9, 0),
    link_generation=5,
    link_width=16,
    max_link_width=16,
    copy_gb_per_s=55.0,
    fetch_gb_per_s=47.0,
)
GOOD = Machine(
    vllm_version="0.33.1",
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    driver_version="580.159",
    driver_cuda=(13, 0),
    library_errors={"cpu": None, "cuda": None},
    seam_errors={"one": None, "two": None},
    connector_module="vllm_hisparse.connector",
    gpus=(GPU, GPU),
    memlock_bytes=None,
    available_bytes=1000 * GIB,
    numa=(NumaNode(0, 600 * GIB, 500 * GIB), NumaNode(1, 600 * GIB, 500 * GIB)),
    host_pool_bytes=200 * GIB,
    num_replicas=2,
)
BARE = Machine()

OK, WARN, FAIL, SKIPPED = Status.OK, Status.WARN, Status.FAIL, Status.SKIPPED
Check = Callable[[Machine], Finding]
CASES: list[tuple[Check, dict[str, Any], Status, str]] = [
    (checks.vllm_version, {"vllm_version": "0.32.0+cpu"}, OK, "0.32.0+cpu"),
    (checks.vllm_version, {"vllm_version": None}, FAIL, "not installed"),
    (checks.vllm_version, {"vllm_version": "0.31.2"}, FAIL, "0.31.2, need >= 0.32, < 0.34"),
    (checks.vllm_version, {"vllm_version": "0.34.0"}, FAIL, "0.34.0, need"),
    (checks.vllm_version, {"vllm_version": "dev"}, FAIL, "dev, need"),
    (checks.torch_version, {}, OK, "CUDA 13.0"),
    (checks.torch_version, {"torch_version": None}, FAIL, "not installed"),
    (checks.torch_version, {"torch_version": "2.10.1"}, FAIL, "need >= 2.11"),
    (checks.cuda_driver, {}, OK, "driver 580.159 serves CUDA 13.0, torch has 13.0"),
    (checks.cuda_driver, {"torch_cuda": "13.2"}, OK, "torch has 13.2"),  # minor versions are compatible
    (checks.cuda_driver, {"driver_cuda": (12, 8)}, FAIL, "serves CUDA 12.8"),
    (checks.cuda_driver, {"driver_cuda": None}, WARN, "cannot be read"),
    (checks.cuda_driver, {"torch_cuda": None, "gpus": ()}, FAIL, "without CUDA"),
    (checks.cuda_driver, {"driver_cuda": (12, 8), "gpus": ()}, FAIL, "serves CUDA 12.8, torch has 13.0"),
    (checks.cuda_driver, {"gpus": ()}, FAIL, "torch sees no device"),
    (checks.cuda_driver, {"driver_cuda": None, "gpus": ()}, FAIL, "no libcuda.so.1"),
    (
        checks.cuda_driver,
        {"driver_version": None, "driver_cuda": None, "gpus": ()},
        SKIPPED,
        "no CUDA device",
    ),
    (checks.cuda_driver, {"driver_cuda": None, "torch_cuda": None, "gpus": ()}, SKIPPED, "no CUDA device"),
    (checks.gpu_generation, {}, OK, "2 x NVIDIA H200 (sm_90)"),
    (checks.gpu_generation, {"gpus": (replace(GPU, capability=(8, 0)),)}, FAIL, "sm_80"),
    (checks.gpu_generation, {"gpus": ()}, SKIPPED, "no CUDA device"),
    (checks.cpu_library, {}, OK, "loads"),
    (checks.cpu_library, {"library_errors": {"cpu": "got no file"}}, FAIL, "got no file"),
    (checks.cpu_library, {"library_errors": {}}, SKIPPED, "torch is missing"),
    (checks.cuda_library, {}, OK, "loads"),
    (
        checks.cuda_library,
        {"library_errors": {"cpu": None, "cuda": "lacks a symbol"}},
        FAIL,
        "lacks a symbol",
    ),
    (checks.cuda_library, {"torch_cuda": None, "gpus": ()}, SKIPPED, "no CUDA device"),
    (checks.ledger, {}, OK, "all 2 symbols"),
    (checks.ledger, {"seam_errors": {"one": None, "two": "takes other parameters"}}, FAIL, "takes other"),
    (checks.ledger, {"seam_errors": {}}, SKIPPED, "no supported vLLM"),
    (checks.connector, {}, OK, "is vllm_hisparse.connector"),
    (checks.connector, {"connector_module": "vllm.v1.hisparse"}, FAIL, "taken by vllm.v1.hisparse"),
    (checks.connector, {"connector_module": None}, SKIPPED, "no vLLM"),
    (checks.connector, {"connector_error": "got vLLM 0.31"}, FAIL, "got vLLM 0.31"),
    (checks.connector, {"vllm_plugins": "lora,other"}, FAIL, "VLLM_PLUGINS=lora,other leaves"),
    (checks.connector, {"vllm_plugins": "lora,hisparse"}, OK, "is vllm_hisparse.connector"),
    (checks.platform, {}, OK, "vLLM's own"),
    (checks.platform, {"platforms": ("hisparse_cpu",)}, OK, "hisparse_cpu"),
    (checks.platform, {"platforms": ("ascend",)}, WARN, "ascend"),
    (checks.platform, {"platforms": ("hisparse_cpu", "ascend")}, FAIL, "claimed by hisparse_cpu, ascend"),
    (checks.pinned_memory, {}, OK, "no limit"),
    (checks.pinned_memory, {"memlock_bytes": 300 * GIB}, OK, "for a pool of 200 GiB"),
    (checks.pinned_memory, {"memlock_bytes": 8 * MIB}, WARN, "limit of 8.0 MiB"),
    (checks.pinned_memory, {"memlock_bytes": 8 * MIB, "host_pool_bytes": None}, WARN, "limit of 8.0 MiB"),
    (checks.pinned_memory, {"gpus": ()}, SKIPPED, "nothing is pinned"),
    (checks.host_memory, {}, OK, "1,000.0 GiB available, 400.0 planned in 2 pools"),
    (checks.host_memory, {"host_pool_bytes": None}, OK, "name a pool"),
    (checks.host_memory, {"host_pool_bytes": 501 * GIB}, FAIL, "1,002.0 planned"),
    (checks.host_memory, {"host_pool_bytes": 480 * GIB}, WARN, "little is left"),
    (
        checks.host_memory,
        {"cgroup_limit_bytes": 300 * GIB, "cgroup_used_bytes": 10 * GIB},
        FAIL,
        "290.0 GiB left in the container",
    ),
    (checks.host_memory, {"cgroup_limit_bytes": 5 * GIB, "cgroup_used_bytes": 6 * GIB}, FAIL, "0.0 GiB left"),
    (checks.numa, {}, OK, "node 0: 500.0 GiB free, node 1"),
    (checks.numa, {"host_pool_bytes": 501 * GIB}, WARN, "spans nodes"),
    (checks.numa, {"numa": GOOD.numa[:1], "host_pool_bytes": 501 * GIB}, OK, "node 0"),
    (checks.numa, {"numa": ()}, SKIPPED, "does not say"),
    (checks.pcie_link, {}, OK, "Gen5 x16"),
    (checks.pcie_link, {"gpus": (GPU, replace(GPU, link_width=8))}, WARN, "Gen5 x8"),
    (checks.pcie_link, {"gpus": (replace(GPU, link_generation=3),)}, WARN, "Gen3 x16"),
    (checks.pcie_link, {"gpus": (replace(GPU, link_generation=None),)}, SKIPPED, "driver does not say"),
    (checks.pcie_link, {"gpus": ()}, SKIPPED, "no CUDA device"),
    (
        checks.host_reads,
        {"gpus": (GPU, replace(GPU, copy_gb_per_s=54.0))},
        OK,
        "54.0 GB/s by the copy engine, 47.0 GB/s in rows by our kernel; on the slowest of 2 GPUs",
    ),
    (checks.host_reads, {"gpus": (replace(GPU, copy_gb_per_s=12.0),)}, WARN, "12.0 GB/s"),
    (checks.host_reads, {"gpus": (replace(GPU, fetch_gb_per_s=9.0),)}, WARN, "9.0 GB/s in rows"),
    (checks.host_reads, {"gpus": (replace(GPU, fetch_gb_per_s=None),)}, OK, "55.0 GB/s by the copy engine"),
    (
        checks.host_reads,
        {"gpus": (replace(GPU, copy_gb_per_s=None, fetch_gb_per_s=None),)},
        SKIPPED,
        "not measured",
    ),
    (checks.host_reads, {"gpus": ()}, SKIPPED, "no CUDA device"),
]


@pytest.mark.parametrize(
    ("check", "changes", "status", "detail"),
    CASES,
    ids=[f"{case[0].__name__}-{case[2].value}-{i}" for i, case in enumerate(CASES)],
)
def test_outcomes(check: Check, changes: dict[str, Any], status: Status, detail: str) -> None:
    finding = check(replace(GOOD, **changes))
    assert finding.status is status, finding
    assert detail in finding.detail
    assert bool(finding.remedy) is (status in (WARN, FAIL)), "a problem comes with its remedy, only"


def test_every_check_has_a_case_for_each_outcome_it_can_have() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)


def test_a_machine_of_which_nothing_is_known() -> None:
    findings = check_all(BARE)
    assert len(findings) == len(CHECKS)
    assert {f.check for f in findings if f.status is FAIL} == {"vLLM", "torch"}


def test_the_floor_of_torch_is_that_of_the_ops() -> None:
    assert checks.TORCH_FLOOR == TORCH_FLOOR


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    app = typer.Typer()
    app.command()(command.doctor)

    def run(machine: Machine, *arguments: str) -> Any:
        monkeypatch.setattr(command, "probe", lambda host_pool_gib, num_replicas: machine)
        return CliRunner().invoke(app, arguments)

    return run


def test_the_command(doctor: Callable[..., Any]) -> None:
    good = doctor(GOOD)
    assert good.exit_code == 0
    assert good.output.splitlines()[-1] == "14 ok"
    bad = doctor(replace(GOOD, vllm_version="0.31"))
    assert bad.exit_code == 1
    assert '-> pip install "vllm>=0.32,<0.34"' in bad.output
    assert bad.output.splitlines()[-1] == "13 ok, 1 fail"
    assert doctor(replace(GOOD, memlock_bytes=1)).exit_code == 0, "a warning is no failure"


def test_json(doctor: Callable[..., Any]) -> None:
    result = doctor(replace(GOOD, connector_module="vllm.other"), "--json")
    assert result.exit_code == 1
    content = json.loads(result.output)
    assert not content["ok"]
    assert [f["check"] for f in content["findings"] if f["status"] == "fail"] == ["HiSparseConnector"]


def test_this_machine() -> None:
    """The real probes: whatever the machine, they return and the plugin is found in order."""
    pytest.importorskip("vllm")
    machine = probes.probe(1.5, 2)
    assert machine.planned_bytes == 3 * GIB
    findings = {finding.check: finding for finding in check_all(machine)}
    for name in ("vLLM", "torch", "CPU library", "vLLM internals", "HiSparseConnector"):
        assert findings[name].status is OK, findings[name]
    assert machine.available_bytes > 0


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_numa(tmp_path: Path) -> None:
    info = "Node {0} MemTotal:       {1} kB\nNode {0} MemFree:        {2} kB\n"
    files = {
        f"node{n}/meminfo": info.format(n, total, free)
        for n, total, free in [(10, 8, 1), (2, 4, 3), (3, 0, 0)]
    }
    nodes = probes.probe_numa(write(tmp_path, files))
    assert nodes == (NumaNode(2, 4096, 3072), NumaNode(10, 8192, 1024))
    assert probes.probe_numa(tmp_path / "nowhere") == ()


def test_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "GPU-aaaa, 5, 16, 16, 580.159.04\n"
        "GPU-bbbb, [N/A], 8, [Not Supported], 580.159.04\n"
        "No devices were found\n"
    )
    monkeypatch.setattr(probes, "_output", lambda command: said)
    known = probes._nvidia_smi()
    assert list(known) == ["GPU-aaaa", "GPU-bbbb"]
    widths = [probes._integer(row["pcie.link.width.max"]) for row in known.values()]
    assert widths == [16, None]


def test_the_driver_is_asked_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version:  gcc version 13.3.0\n"
    )
    monkeypatch.setattr(probes, "_output", lambda command: "")
    monkeypatch.setattr(probes.ctypes, "CDLL", Library)
    proc = write(tmp_path, {"driver/nvidia/version": said})
    assert probes.probe_driver(proc) == ("580.159.04", (13, 1))
    assert probes.probe_driver(tmp_path / "nowhere") == (None, (13, 1))


class Library:
    """libcuda.so.1 of a driver that serves CUDA 13.1."""

    def __init__(self, name: str) -> None:
        assert name == "libcuda.so.1"

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802 the driver's name
        number._obj.value = 13010
        return 0


def test_the_kernel_that_is_measured_reads_what_it_should() -> None:
    load_library("cpu")
    host = torch.randint(0, 256, (500, speed.LAYERS * speed.ROW_BYTES), dtype=torch.uint8)
    fetch, pool, rows = speed.fetch_rows(host, torch.device("cpu"), requests=3, misses=128)
    fetch()
    found = pool.view(
        3, 2, speed.LAYERS, speed.BLOCK_SIZE, speed.ROW_BYTES
    )  # [region, block, layer, slot, byte]
    found = found.permute(0, 1, 3, 2, 4).reshape(3, 128, -1)
    assert torch.equal(found, host[rows])


def test_probes_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_version", lambda names: None)
    assert probes.probe_libraries() == {}
    monkeypatch.setattr(probes, "check_version", lambda: 1 / 0)
    assert probes.probe_seams() == {}
    assert probes._output(("no-such-program-here",)) == ""
