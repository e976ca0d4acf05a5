"""What each layer may import: `core/` and `policy/` stay pure."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "diloco_jax"
ALLOWED = {
    "core": {"jax", "optax", "numpy", "diloco_jax.core"},
    "policy": {"msgspec", "diloco_jax.policy"},
}
IMPURE = {"asyncio", "logging", "socket", "ssl", "subprocess", "threading", "time"}


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names of everything a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def is_allowed(module: str, layer: str) -> bool:
    """Whether a module of that layer may import this one."""
    if module.split(".")[0] in sys.stdlib_module_names:
        return module.split(".")[0] not in IMPURE
    return any(module == ok or module.startswith(f"{ok}.") for ok in ALLOWED[layer])


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_layer_imports_only_what_it_may(layer: str) -> None:
    files = sorted((PACKAGE / layer).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in files
        for module in imported_modules(path.read_text(encoding="utf-8"))
        if not is_allowed(module, layer)
    ]
    assert not wrong


def test_policies_have_no_arrays() -> None:
    assert not is_allowed("numpy", "policy")
    assert is_allowed("numpy", "core")


@pytest.mark.parametrize(
    "source",
    ["import flax", "from diloco_jax import config", "from . import x", "import time"],
)
def test_the_check_sees_forbidden_imports(source: str) -> None:
    inside = f"def f():\n    {source}\n"
    for layer in ALLOWED:
        assert not all(is_allowed(name, layer) for name in imported_modules(inside))
