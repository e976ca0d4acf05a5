"""The files that one delta goes through, from its take to its adoption.

A coordinator and one island run in this process. Functions that are called while the
island only trains and reports are not of the path; those that are called beside them
once a take is asked for, are. A type belongs to it if a function gets such a value then
and none before. All the files of both count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import jax
import pytest
from runtime_support import PATIENCE_S, coordinator, make_config, placed, with_run
from tiny import SEQUENCE_LENGTH

import diloco_jax
from diloco_jax.island.main import TrainingHost
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.island.boundary import Ending

pytestmark = pytest.mark.dist

PACKAGE = Path(diloco_jax.__file__).parent
MOST_FILES = 36
"""There are 34, or one or two more by what else falls into these seconds."""
IDLE_STEPS, BEFORE_TAKE, STEPS_PER_CYCLE = 3, 180, 400
PAUSE_S = 0.1
OUTAGE_BUDGET_S = 4.0
"""Short, so that data is granted while the island only trains: its first grant lasts
for 128 steps, each later one for some seconds. Meanwhile the coordinator looks at its
machine, too, as it does every few seconds."""
SNAPSHOT_EVERY_S = 4.0
"""Short, so that the state's first snapshots are written then, too."""
LARGE = 50
"""Elements of a tuple whose types are not looked at."""


class Calls:
    """Functions of the package that are called, and the types of what they get."""

    def __init__(self) -> None:
        self.seen: dict[CodeType, set[type]] = defaultdict(set)
        self._on = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[dict[CodeType, set[type]]]:
        self.seen, self._on = defaultdict(set), True
        yield self.seen
        self._on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not self._on or event != "call" or str(PACKAGE) not in code.co_filename:
            return
        types = self.seen[code]
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name)
            for each in (
                value if type(value) is tuple and len(value) < LARGE else [value]
            ):
                if type(each).__module__.startswith(diloco_jax.__name__):
                    types.add(type(each))


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls()
    threading.setprofile(calls)
    sys.setprofile(calls)
    yield calls
    sys.setprofile(None)
    threading.setprofile(None)


def file_of(module: str) -> Path:
    return PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")


def files_of_path(
    idle: dict[CodeType, set[type]], taken: dict[CodeType, set[type]]
) -> set[Path]:
    """The files of `taken` that `idle` does not need."""
    types = set().union(*taken.values()) - set().union(*idle.values())
    files = {file_of(kind.__module__) for kind in types}
    for code, got in taken.items():
        if code not in idle or got & types:
            files.add(Path(code.co_filename))
    return files


def test_a_delta_goes_through_few_files(text, tmp_path, calls):
    config = make_config(text, steps_per_cycle=STEPS_PER_CYCLE, quorum=1)
    config = dataclasses.replace(config, islands={"a": config.islands["a"]})
    config = with_run(config, total_tokens=8000 * SEQUENCE_LENGTH)
    config = placed(
        config, outage_budget_s=OUTAGE_BUDGET_S, snapshot_every_s=SNAPSHOT_EVERY_S
    )
    with coordinator(config, tmp_path / "run") as service:
        island = TrainingHost(config, "a", service.address, tmp_path / "a")
        island.start()
        loop = island.loop

        def step() -> None:
            assert loop.until_step() is None
            loop._validate()
            loop._train_step(loop.data.next_batch(PATIENCE_S))

        for _ in range(IDLE_STEPS):
            step()
        books = loop.boundary.books
        first = books.versions()
        with calls.noted() as idle:
            # As at a start, whose functions are not of the path, either.
            assert list(island.exchange.lower_all())
            jax.jit(lambda: 0).lower().compile()
            give_memory_back()
            while loop.done < BEFORE_TAKE:
                step()
                time.sleep(PAUSE_S)  # Reports go once in a while.
        assert not books.outstanding()
        until = time.monotonic() + PATIENCE_S
        with calls.noted() as taken:
            while books.versions() == first:
                assert time.monotonic() < until
                step()
                time.sleep(PAUSE_S)
        island.stop(Ending(0, "the path is walked", "stopped"))
        island.close()
    files = files_of_path(idle, taken)
    names = sorted(str(file.relative_to(PACKAGE)) for file in files)
    for known in (
        "island/device/exchange.py",
        "core/merging.py",
        "wire/bulk_server.py",
    ):
        assert known in names, "the path itself"
    assert len(names) <= MOST_FILES, "\n".join(names)
