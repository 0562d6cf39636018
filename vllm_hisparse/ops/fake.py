"""Fake implementations for torch.compile. Every op works in place and returns nothing: nothing to infer."""

import torch

OPS = (
    "resolve", "forget", "write_words",
    "fetch", "fetch_selected", "write_pages", "read_pages", "gather_pages",
)  # fmt: skip


def register() -> None:
    """To be called once, after the library that defines the ops is loaded."""
    for name in OPS:
        torch.library.register_fake(f"hisparse::{name}")(_nothing)


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None
