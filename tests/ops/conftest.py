import pytest

from vllm_hisparse import ops


@pytest.fixture(scope="session", autouse=True)
def cpu_library() -> None:
    ops.load_library("cpu")
