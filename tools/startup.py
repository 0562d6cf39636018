"""What docs/getting-started.md shows of a plan and of the log of the engine that follows it."""

from vllm_hisparse.cli.plan_report import report, text
from vllm_hisparse.config import GIB
from vllm_hisparse.planning.estimate import Estimate, Setup, estimate
from vllm_hisparse.planning.machines import GPU_UTILIZATION, kv_memory_bytes
from vllm_hisparse.planning.models import load_model
from vllm_hisparse.planning.report import startup_lines

MODEL, GPU, RANKS, CONTEXT, POOL_GIB = "glm-5.2", "h200", 8, 131072, 256


def plan() -> str:
    """The command and what it prints."""
    setup = f"--gpu {GPU} --tp {RANKS} --context {CONTEXT} --host-pool-gib {POOL_GIB}"
    return _indented(
        f"$ vllm-hisparse plan {MODEL} {setup}\n{text(report(_example(), RANKS, GPU, GPU_UTILIZATION))}"
    )


def log() -> str:
    """The lines that the engine of that plan logs when it starts."""
    result = _example()
    lines = startup_lines(result.setup.vllm_config(), result.layout)
    return _indented("\n".join(f"HiSparse: {line}" for line in lines))


def _example() -> Estimate:
    model = load_model(MODEL)
    return estimate(Setup(model, kv_memory_bytes(model, GPU, RANKS, 0), CONTEXT, POOL_GIB * GIB))


def _indented(block: str) -> str:
    return f"\n```text\n{block}\n```\n"
