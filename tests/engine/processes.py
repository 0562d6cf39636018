"""Environment of the programs that tests start."""

import os
from pathlib import Path

__all__ = ["environment"]

ROOT = Path(__file__).parents[2]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def environment(**variables: str) -> dict[str, str]:
    """This process's, with one thread a worker, this checkout's modules, and `variables`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inherited = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return {**inherited, **ONE_THREAD, "PYTHONPATH": path, **variables}
