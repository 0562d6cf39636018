"""Everything here needs a GPU and the CUDA library; without either it is skipped with the reason."""

import os

import pytest
import torch

from vllm_hisparse.ops import LibraryError, load_library


@pytest.fixture(scope="session", autouse=True)
def cuda_ops() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        load_library("cpu")
        load_library("cuda")
    except LibraryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def num_steps() -> int:
    """Random steps a configuration. soak.py runs 10,000; a sanitizer wants fewer."""
    return int(os.environ.get("HISPARSE_TEST_STEPS", "300"))
