"""The data plane's ops: thin, typed, checked Python over the compiled libraries.

`load_library` first, from the worker. `reference` holds the same ops in plain PyTorch.
"""

from vllm_hisparse.ops import reference
from vllm_hisparse.ops.load import LibraryError, is_loaded, load_library
from vllm_hisparse.ops.pages import fetch, fetch_selected, gather_pages, read_pages, write_pages
from vllm_hisparse.ops.regions import EMPTY_KEY, MAX_SLOTS, Counter, Policy, forget, make_batch, resolve
from vllm_hisparse.ops.words import write_words

__all__ = [
    "EMPTY_KEY",
    "MAX_SLOTS",
    "Counter",
    "LibraryError",
    "Policy",
    "fetch",
    "fetch_selected",
    "forget",
    "gather_pages",
    "is_loaded",
    "load_library",
    "make_batch",
    "read_pages",
    "reference",
    "resolve",
    "write_pages",
    "write_words",
]
