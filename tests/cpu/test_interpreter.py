"""Bringing up the interpreter in fresh processes, with Triton imported too early as `import torch` may do."""

import os
import subprocess
import sys

KERNEL = """
import triton, triton.language as tl
assert "TRITON_INTERPRET" not in os.environ
from vllm_hisparse.cpu import interpreter
interpreter.enable(); interpreter.enable()
import torch

@triton.jit
def kernel(x, out, N: tl.constexpr):
    row = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(row, 0) + row.max() + tl.cdiv(7, 2))

out = torch.zeros(1)
kernel[(1,)](torch.arange(8.0), out, N=8)
print("result", out.item())
"""
AGAIN = (
    KERNEL
    + """
from triton.runtime import interpreter
def refuse(*_):
    raise AssertionError("it is patched already")
interpreter._patch_builtin = refuse
kernel[(1,)](torch.arange(1.0, 9.0), out, N=8)
print("result", out.item())
"""
)
BACKENDS = """
from vllm_hisparse.cpu import interpreter
interpreter.enable()
from triton.backends import backends
print("result", "cpu" in backends, os.environ.get("TRITON_INTERPRET"))
"""


def run(source: str, **variables: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | variables
    done = subprocess.run(
        [sys.executable, "-c", "import os\n" + source],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_library_functions_are_interpreted_too() -> None:
    assert run(KERNEL) == "result 39.0"  # 28 + 7 + 4


def test_the_language_is_patched_once() -> None:
    assert run(AGAIN) == "result 48.0"  # 36 + 8 + 4


def test_variable_reaches_children() -> None:
    assert run(BACKENDS) == "result True 1"


def test_user_can_keep_it_off() -> None:
    assert run(BACKENDS, TRITON_INTERPRET="0") == "result False 0"
