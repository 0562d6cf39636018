import pytest

from tests.engine.conftest import model_path
from vllm_hisparse import cpu

pytest.importorskip("vllm")

__all__ = ["model_path"]

collect_ignore_glob = [] if cpu.is_cpu_build() else ["test_*.py"]
