"""DSA models on vLLM's CPU build, exact and deterministic: for CI and the demo, not for speed.

Nothing here has an effect on another build of vLLM. This module imports neither torch nor vLLM.

| module | content |
|---|---|
| `platform.py` | platform class: sparse MLA admitted, HiSparse flag carried past the CUDA-only check |
| `interpreter.py` | Model Runner V2's Triton kernels through Triton's interpreter |
| `attention.py`, `indexer.py` | the two halves of sparse attention, in plain PyTorch |
| `kernels/` | stand-ins for kernels that the interpreter cannot run, or runs slowly |
| `rows.py`, `worker.py` | matrix products whose rows do not depend on the batch they are in |
"""


def platform_plugin() -> str | None:
    """Entry point of group `vllm.platform_plugins`: our platform class on a CPU build, else None.

    vLLM calls it while it decides whether Triton is usable, which is when the interpreter must be on.
    Idempotent.
    """
    if not is_cpu_build():
        return None
    from . import interpreter

    interpreter.enable()
    return "vllm_hisparse.cpu.platform.HiSparseCpuPlatform"


def register() -> None:
    """Entry point of group `vllm.general_plugins`: registers the attention backend and the indexer.

    No effect unless `HiSparseCpuPlatform` is the active platform. Idempotent.
    """
    if not is_cpu_build():
        return
    from vllm.platforms import current_platform

    from .platform import HiSparseCpuPlatform

    if not isinstance(current_platform, HiSparseCpuPlatform):
        return
    from . import attention, indexer

    attention.register()
    indexer.register()


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a build for the CPU."""
    from vllm.platforms import vllm_version_matches_substr

    return vllm_version_matches_substr("cpu")
