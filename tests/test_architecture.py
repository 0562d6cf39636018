"""Imports flow down, and documents that are generated from the code say what the code says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_hisparse"

# Top to bottom. A module may import from layers below its own, and from its own folder.
LAYERS = (
    {"cli"},
    {"simulation"},
    {"testing"},
    {"plugin"},
    {"compat"},
    {"connector", "nixl_connector", "cpu"},
    {"peers"},
    {"scheduler", "worker"},
    {"runtime"},
    {"planning", "metrics", "policies", "engine_checks"},
    {"messages", "ops", "traces"},
    {"config"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _layer(module: str) -> str:
    return module.split(".")[1]


def _imports(path: Path) -> set[str]:
    """Names of our modules that a file imports, relative imports resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("vllm_hisparse.") and _layer(name) in LEVEL}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_flow_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        assert not _imports(path), "the package itself must stay light"
        return
    upward = {m for m in _imports(path) if _layer(m) != own and LEVEL[_layer(m)] <= LEVEL[own]}
    assert not upward, f"{own} is on layer {LEVEL[own]}"


def test_every_module_has_a_layer() -> None:
    modules = {
        p.name.removesuffix(".py")
        for p in PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert modules - {"__init__"} == set(LEVEL)


@pytest.mark.parametrize("module", ["plugin", "config"])
def test_light_modules_import_neither_torch_nor_vllm(module: str) -> None:
    code = f"import sys, vllm_hisparse.{module}; sys.exit(bool({{'torch', 'vllm'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_generated_documents_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
