"""What vLLM and the plugin log, for as long as a block lasts: a logger's level outlives whoever sets it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import vllm  # noqa: F401  (sets its loggers up)

__all__ = ["errors_logged", "only_errors"]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def only_errors(level: int = logging.ERROR) -> Iterator[None]:
    """Nothing below `level` is logged."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def errors_logged() -> Iterator[list[str]]:
    """The messages of errors, in order; the list grows."""
    logger, handler = logging.getLogger("vllm"), _Messages()
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
