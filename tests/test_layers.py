"""The imports allowed to each layer: `core/` and `protocol/` stay pure. All imports are
declared, and a wheel has all files; `.ci/wheel` builds one and runs it."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "diloco_jax"
ALLOWED = {
    "core": {"jax", "optax", "numpy", "xxhash", "diloco_jax.core"},
    "protocol": {"msgspec", "diloco_jax.protocol"},
}
MODULES = {
    "huggingface-hub": "huggingface_hub",
    "skypilot": "sky",
    "orbax-checkpoint": "orbax",
    "array-record": "array_record",
    "pillow": "PIL",
    "grpcio": "grpc",
    "pyyaml": "yaml",
    "google-cloud-storage": "google",
    "gcp-storage-emulator": "gcp_storage_emulator",
    "lm-eval": "lm_eval",
    "prometheus-client": "prometheus_client",
    "jax[tpu]": "jax",
    "kubernetes-validate": "kubernetes_validate",
    "kubeflow-trainer-api": "kubeflow_trainer_api",
}
"""Imported under another name than the one they are installed by."""
IMPURE = {"asyncio", "logging", "socket", "ssl", "subprocess", "threading", "time"}


@functools.cache
def imported_modules(source: str, *, names: bool = False) -> tuple[str, ...]:
    """Dotted names of everything a module imports, at any depth of its code. names:
    also each name of a `from` import, which may be a module."""
    return tuple(_imported(source, names))


def _imported(source: str, names: bool) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            if names:
                yield from (f"{module}.{alias.name}" for alias in node.names)


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Groups of modules that import each other, at any depth of their code, given
    their source by dotted name."""
    graph = {name: imports_among(name, sources) for name in sources}
    reached = {name: closure(name, graph) for name in graph}
    groups = {
        tuple(sorted(b for b in reached[a] if a in reached[b]))
        for a in graph
        if a in reached[a]
    }
    return sorted(map(list, groups))


def imports_among(name: str, sources: dict[str, str]) -> set[str]:
    """Which of these modules a module imports; a module of another package comes with
    its package."""
    found = set()
    for module in imported_modules(sources[name], names=True):
        while module:
            if module in sources and not f"{name}.".startswith(f"{module}."):
                found.add(module)
            module = module.rpartition(".")[0]
    return found


def closure(name: str, graph: dict[str, set[str]]) -> set[str]:
    """Everything that a module imports, directly or not."""
    found: set[str] = set()
    ahead = list(graph[name])
    while ahead:
        if (module := ahead.pop()) not in found:
            found.add(module)
            ahead += graph[module]
    return found


def package_sources() -> dict[str, str]:
    """The package's sources by dotted name."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


def is_allowed(module: str, layer: str) -> bool:
    """Return True if a module of that layer may import this one."""
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


def test_no_modules_import_each_other() -> None:
    assert circles(package_sources()) == []


def test_the_check_sees_circles() -> None:
    sources = {"p": "", "p.a": "from p import b", "p.b": "def f():\n    import p.a"}
    assert circles(sources) == [["p.a", "p.b"]]
    sources["p.b"] = "if TYPE_CHECKING:\n    import p.a"
    assert circles(sources) == [["p.a", "p.b"]]
    through_a_package = {"p.q": "import p.c", "p.q.d": "", "p.c": "import p.q.d"}
    assert circles(through_a_package) == [["p.c", "p.q"]]


def drawn_packages() -> dict[str, set[str]]:
    """The packages that each package imports by the table of architecture.md."""
    page = PACKAGE.parent / "docs" / "design" / "architecture.md"
    rows = re.findall(r"^\| `(\w+)/` \| ([\w, ]*)\| .*\|$", page.read_text(), re.M)
    return {name: set(re.findall(r"\w+", others)) for name, others in rows}


def test_packages_import_those_that_the_architecture_names() -> None:
    drawn, sources = drawn_packages(), package_sources()
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    found: dict[str, set[str]] = {package: set() for package in packages}
    for name in sources:
        package = name.partition(".")[2].partition(".")[0]
        if package in found:
            others = {module.split(".")[1] for module in imports_among(name, sources)}
            found[package] |= (others & packages) - {package}
    assert found == drawn


PEERS = PACKAGE.parent / "benchmarks" / "peers" / "requirements.txt"
SKY = PACKAGE.parent / ".ci" / "sky"


def declared(extra: str | None = None) -> set[str]:
    """Top modules of what setup.cfg installs, or of what the venvs of the peers and of
    SkyPilot have."""
    if extra == "peers":
        return set(re.findall(r"^\w+", PEERS.read_text(), re.M))
    if extra == "sky":
        packages = re.findall(r"^SKYPILOT=(\w+)==", SKY.read_text(), re.M)
        return {MODULES[package] for package in packages}
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    lines = (
        setup["options.extras_require"][extra]
        if extra
        else setup["options"]["install_requires"]
    )
    names = [re.split(r"[><=]", line)[0] for line in lines.split()]
    return {MODULES.get(name, name).split("[")[0] for name in names}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("diloco_jax", ("gcs", "text", "eval", "wandb")),
        ("tests", ("test", "fixtures", "sky")),
        ("benchmarks", ("test", "fixtures", "peers")),
    ],
)
def test_what_is_imported_is_declared(folder: str, extras: tuple[str, ...]) -> None:
    files = list((PACKAGE.parent / folder).rglob("*.py"))
    # A benchmark may open the page in the browser of the dashboard's tests.
    shared = ("benchmarks", "docs", "tests/dashboard")
    scripts = (path for name in shared for path in (PACKAGE.parent / name).glob("*.py"))
    ours = {path.stem for path in (*files, *scripts)} | {"diloco_jax", "benchmarks", ""}
    known = declared().union(*(declared(extra) for extra in extras))
    wrong = [
        f"{path.relative_to(PACKAGE.parent)} imports {module}"
        for path in files
        for module in imported_modules(path.read_text(encoding="utf-8"))
        if module.split(".")[0] not in {*sys.stdlib_module_names, *known, *ours}
    ]
    assert not wrong


def test_what_is_declared_is_justified() -> None:
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    lines = [setup["options"]["install_requires"]]
    lines += setup["options.extras_require"].values()
    names = {re.split(r"[><=\[]", line)[0] for part in lines for line in part.split()}
    page = (PACKAGE.parent / "docs" / "dependencies.md").read_text()
    cells = " ".join(line.split("|")[1] for line in page.splitlines() if "|" in line)
    assert not names - set(re.findall(r"[\w-]+", cells))


def test_each_package_has_its_licence() -> None:
    page = (PACKAGE.parent / "docs" / "dependencies.md").read_text()
    packages = page.split("| package | why |")[1].split("\n\n")[0]
    rows = [line for line in packages.splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    known = r"(Apache|BSD|MIT|MPL|GPL|its own|not under a free licence|own licence)"
    assert [row for row in rows if not re.search(known, row)] == []


def test_only_models_see_flax() -> None:
    seen = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for module in imported_modules(path.read_text(encoding="utf-8"))
        if module.split(".")[0] == "flax"
    }
    assert seen == {"models"}


def test_policies_have_no_arrays() -> None:
    assert not is_allowed("numpy", "protocol")
    assert is_allowed("numpy", "core")


def test_a_config_is_read_and_a_run_started_and_asked_without_jax() -> None:
    code = (
        "import dataclasses, sys, diloco_jax.cluster.run, diloco_jax.cluster.status; "
        "from diloco_jax.config.loading import read_config; "
        "from diloco_jax.config.options import parse_with_config; "
        "NoOptions = dataclasses.make_dataclass('NoOptions', ()); "
        "config, overrides = read_config(sys.argv[1]), ['--sync.merge', 'mean']; "
        "parse_with_config(config, overrides, NoOptions(), 'diloco run'); "
        "print('jax' in sys.modules)"
    )
    config = PACKAGE.parent / "configs" / "quickstart.py"
    done = subprocess.run(
        [sys.executable, "-c", code, config], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "source",
    ["import flax", "from diloco_jax import config", "from . import x", "import time"],
)
def test_the_check_sees_forbidden_imports(source: str) -> None:
    inside = f"def f():\n    {source}\n"
    for layer in ALLOWED:
        assert not all(is_allowed(name, layer) for name in imported_modules(inside))


def test_every_file_of_the_package_goes_into_the_wheel():
    settings = configparser.ConfigParser()
    settings.read(PACKAGE.parent / "setup.cfg")
    patterns = {
        f"{package.replace('.', '/')}/{pattern}"
        for package, value in settings["options.package_data"].items()
        for line in value.splitlines()
        for pattern in line.replace(",", " ").split()
        if not line.lstrip().startswith("#")
    }
    others = [
        path.relative_to(PACKAGE.parent).as_posix()
        for path in [*PACKAGE.rglob("*"), *(PACKAGE / "configs").glob("*.py")]
        if path.is_file()
        and "__pycache__" not in path.parts
        and (path.suffix != ".py" or path.parent.name == "configs")
    ]
    assert len(others) > 8
    for path in others:
        assert any(fnmatch.fnmatchcase(path, p) for p in patterns), path


def test_every_folder_with_modules_is_a_package():
    """Only packages are found."""
    for path in PACKAGE.rglob("*.py"):
        assert (path.parent / "__init__.py").is_file(), path
