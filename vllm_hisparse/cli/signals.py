"""Signals that ask a program to end: noted, so that it ends where it has everything in its hands."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Stopped", "note_signals"]

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal asked the program to end; nothing that handles errors takes it for one.

    `status` is the exit status that shells show for it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.status = 128 + number


@contextmanager
def note_signals() -> Iterator[Callable[[], None]]:
    """In here Ctrl-C, SIGTERM and a closed terminal do nothing but that the given call raises Stopped.

    An exception out of a handler may come while a process is being started or ended, and is lost in a
    destructor. Who starts processes makes the call instead, wherever it may wait; signals that come later
    change nothing. Once the call has raised, they are ignored for good: the program is about to end, and
    Python takes a while for that. One that is ignored stays ignored. For the main thread.
    """
    noted: list[int] = []
    is_ending = False

    def check() -> None:
        nonlocal is_ending
        if noted:
            is_ending = True
            raise Stopped(noted[0])

    handlers = {number: signal.getsignal(number) for number in NUMBERS}
    caught = [number for number, handler in handlers.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, lambda number, frame: noted.append(number))
    try:
        yield check
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_IGN if is_ending else handlers[number])
