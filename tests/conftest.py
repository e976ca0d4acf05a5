"""For all tests: what one process of the suite compiled, the others load."""

import functools
import gc
import itertools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax"

# libtpu is here to compile for TPUs; there is none to run on.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No device is opened, so that several processes may load it.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# No test asks the hub itself.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:1"
# Before jax is imported anywhere; child processes inherit it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The key with which configs that name code are sealed.
os.environ.setdefault("XDG_STATE_HOME", str(CACHE.parent / "state"))

# How long an example takes is the machine's doing.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker has one left when others end.

    Raises pytest.UsageError if `launch/test.sh` would not find the file of a test that
    has a phase of its own.
    """
    for item, name in itertools.product(items, ("optimized", "tpu_compile", "timing")):
        if item.get_closest_marker(name) and f"mark.{name}" not in text_of(item.path):
            raise pytest.UsageError(f"{item.path}: write pytest.mark.{name} there")
    long = ("notebook", "tpu_compile", "optimized", "dist")
    items.sort(key=lambda item: not any(map(item.get_closest_marker, long)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out of collections of garbage what all tests share: most of them collect
    little else, and each file ends with one."""
    gc.collect()
    gc.freeze()


@functools.cache
def text_of(path: Path) -> str:
    """Return what a file of tests holds."""
    return path.read_text()


@pytest.fixture(autouse=True, scope="module")
def compiled() -> Iterator[None]:
    """Nothing stays compiled from file to file: half of a worker's memory."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A command that is called here sets variables for a process of its own."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def log_level() -> None:
    """None of its own, whatever a command, a benchmark or a module's fixture set."""
    logging.getLogger("diloco_jax").setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)
