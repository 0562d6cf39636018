"""Ctrl-C is noted where processes are started, and ends the command line where they are not."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.interrupts import Program, interruptible, program
from vllm_hisparse.cli.signals import NUMBERS, Stopped, note_signals

__all__ = ["program"]

# Ctrl-C while the command line is imported.
IN_AN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from vllm_hisparse.cli.__main__ import main
main()
"""


class InADestructor:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    with interruptible():
        yield


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_the_one_that_counts(number: signal.Signals) -> None:
    with note_signals() as check:
        check()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(2):
            with pytest.raises(Stopped) as stopped:
                check()
            assert stopped.value.status == 128 + number


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_is_changed_for_who_goes_on(number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    with note_signals() as check:
        check()
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize("number", NUMBERS)
def test_who_ends_for_a_signal_is_not_disturbed(number: signal.Signals) -> None:
    """Python's own end is one that a second Ctrl-C would fill with tracebacks."""

    def end() -> None:
        with note_signals() as check:
            os.kill(os.getpid(), number)
            check()

    with pytest.raises(Stopped):
        end()
    for other in NUMBERS:
        os.kill(os.getpid(), other)


def test_a_signal_in_a_destructor_is_not_lost() -> None:
    with note_signals() as check:
        InADestructor()
        with pytest.raises(Stopped):
            check()


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with note_signals() as check:
        os.kill(os.getpid(), signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_in_an_import(program: Callable[..., Program]) -> None:
    running = program(sys.executable, "-c", IN_AN_IMPORT)
    assert running.process.wait() == -signal.SIGINT
    assert running.output == ""


def test_a_background_job_of_a_script_is_not_interrupted(program: Callable[..., Program]) -> None:
    running = program("sh", "-c", '"$0" "$@" & wait $!', sys.executable, "-c", IN_AN_IMPORT, "--help")
    assert running.process.wait() == 0
    assert "Usage" in running.output
