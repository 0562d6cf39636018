"""For all tests."""

import pytest
from hypothesis import settings

settings.register_profile("tests", deadline=None)  # no test fails for being slow: machines differ
settings.load_profile("tests")


@pytest.fixture(scope="session")
def cpu_library() -> None:
    """The ops, on CPU tensors."""
    from vllm_hisparse import ops

    ops.load_library("cpu")
