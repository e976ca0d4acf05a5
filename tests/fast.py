"""`--fast`: tests for three minutes of two cores, chosen by what each file costs.

`tests/seconds.json` has the CPU seconds of each file's tests that have no marker, as
`pytest --measure` measured them; the machine's load does not change them much. `--fast`
leaves out tests with a marker and files that cost more than `FILE_S`, and takes the
others, the cheapest first, until `BUDGET_S` are spent. A file that was never measured
is taken: it runs until somebody measures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "seconds.json"
BUDGET_S = 150.0
"""CPU seconds; two cores have 360 in three minutes, and imports, collection, lint and
types take the rest."""
FILE_S = 4.0
"""CPU seconds of a file above which `--fast` leaves it out, and `--measure` has seen
enough: it skips the rest of the file."""
SLOW = ("dist", "timing", "optimized", "tpu_compile", "notebook", "nightly")
"""Markers of tests that `--fast` leaves out, and `--measure` does not count."""
CPU = "cpu_seconds"
BEGAN = pytest.StashKey[float]()


def chosen(seconds: Mapping[str, float], budget: float) -> set[str]:
    """Return the cheapest files that fit into the budget together."""
    taken, left = set(), budget
    for name, cost in sorted(seconds.items(), key=lambda item: (item[1], item[0])):
        if cost > min(left, FILE_S):
            break
        taken.add(name)
        left -= cost
    return taken


def read_list() -> dict[str, float]:
    """Return the CPU seconds by file, relative to the repository."""
    known: dict[str, float] = json.loads(LIST.read_text())
    return known


def add_options(parser: pytest.Parser) -> None:
    """Add `--fast` and `--measure`."""
    group = parser.getgroup("diloco_jax")
    group.addoption("--fast", action="store_true", help="the cheapest files of tests")
    group.addoption(
        "--measure", action="store_true", help="write tests/seconds.json of what runs"
    )


def register(config: pytest.Config) -> None:
    """Do what the options ask for."""
    if config.getoption("--fast"):
        config.pluginmanager.register(Fast())
    if config.getoption("--measure"):
        config.pluginmanager.register(Measure(config))


class Unmarked:
    """Leaves out the tests that have a marker."""

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the others."""
        slow = [item for item in items if any(map(item.get_closest_marker, SLOW))]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


class Fast(Unmarked):
    """Leaves out the files that are known and not chosen, too."""

    def __init__(self) -> None:
        known = read_list()
        self._out = known.keys() - chosen(known, BUDGET_S)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Tell if a file is left out; None: others may."""
        inside = collection_path.is_relative_to(ROOT)
        name = collection_path.relative_to(ROOT).as_posix() if inside else ""
        return True if name in self._out else None


class Measure(Unmarked):
    """Adds up what the tests of each file use, over all processes of pytest-xdist; each
    file must run in one of them (`--dist loadfile`)."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._sums: dict[str, float] = {}
        self._here: dict[str, float] = {}
        """The same, of the tests that ran in this process."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note what the process had used before a test; skip it if its file is dear."""
        item.stash[BEGAN] = cpu_seconds()
        if self._here.get(file_of(item.nodeid), 0.0) > FILE_S:
            pytest.skip("enough of this file was measured")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put what a test has used into its last report."""
        if call.when == "teardown":
            used, file = cpu_seconds() - item.stash[BEGAN], file_of(item.nodeid)
            self._here[file] = self._here.get(file, 0.0) + used
            item.user_properties.append((CPU, used))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's report, which reaches the main process."""
        if report.when == "teardown":
            name = file_of(report.nodeid)
            used = float(dict(report.user_properties).get(CPU, 0))
            self._sums[name] = self._sums.get(name, 0.0) + used

    def pytest_sessionfinish(self) -> None:
        """Write the list; files that did not run keep their figures."""
        if self._is_worker or not self._sums:
            return
        known = {k: v for k, v in read_list().items() if (ROOT / k).is_file()}
        known |= {name: round(used, 1) for name, used in self._sums.items()}
        lines = [f"  {json.dumps(name)}: {known[name]}" for name in sorted(known)]
        LIST.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def file_of(node: str) -> str:
    """Return the file of a test, relative to the repository."""
    return node.partition("::")[0]


def cpu_seconds() -> float:
    """Return what this process and its ended children have used of the processors."""
    return sum(os.times()[:4])
