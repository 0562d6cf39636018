"""Which kernels have a stand-in."""

from vllm_hisparse.cpu import kernels


def test_every_stand_in_fits_the_installed_vllm() -> None:
    kernels.register()
    assert set(kernels.originals) == set(kernels.STAND_INS.values())


def test_other_parameters_are_refused() -> None:
    def stand_in(a: int, b: int) -> None: ...

    def open_ended(a: int, b: int, **launch: int) -> None: ...

    assert kernels.takes(stand_in, ["a", "b"])
    assert not kernels.takes(stand_in, ["a", "b", "c"])
    assert not kernels.takes(stand_in, ["a"])
    assert kernels.takes(open_ended, ["a", "b", "c"])
    assert not kernels.takes(open_ended, ["a", "c", "b"])
