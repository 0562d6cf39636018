import pytest

from vllm_hisparse import cpu

pytest.importorskip("vllm")

collect_ignore_glob = [] if cpu.is_cpu_build() else ["test_*.py"]
