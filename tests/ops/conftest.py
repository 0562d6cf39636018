import pytest


@pytest.fixture(scope="session", autouse=True)
def loaded(cpu_library: None) -> None:
    """Everything here needs the library."""
