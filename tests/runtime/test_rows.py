"""Every row of a packed mixture is settled once in each epoch, whoever comes and goes.

The protocol, its recovery, the prepared folders and the batches are the product's; time
is virtual, and islands have no arrays. The run is stopped as a whole, and goes on with
other islands, after one of them was killed.
"""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tape_checks

from diloco_jax.config import DataConfig, Placement, RunConfig, SyncConfig
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.data.examples import Reader
from diloco_jax.data.loading import Data, load_data
from diloco_jax.data.prepare import Recipe, prepare
from diloco_jax.data.reader import BatchReader
from diloco_jax.data.source import Shares
from diloco_jax.data.tokenizers import Bytes
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import ledger, recovery
from diloco_jax.protocol.coordinator.state import RunResumed, initial
from diloco_jax.simulation.coordinator import NoArrays, VirtualCoordinator, World
from diloco_jax.simulation.island import IslandSpec, NoBody

LENGTH, FRAGMENTS = 16, 3
WEIGHTS = (2.0, 1.0)
DOCUMENTS = (300, 130)
"""Number of documents of each source; a row has about one of them."""
FIRST, OTHERS = {"a": 4, "b": 2}, {"a": 4, "c": 3, "d": 1}
"""Rows of a step by island, before the stop and after it."""
KILL_S, RETURN_S, STOP_S = 40.3, 50.0, 110.7
ROWS = 2600

Incarnation = tuple[str, int]


class Read(NamedTuple):
    """A row that an island has read for a step."""

    island: Incarnation
    step: int
    source: int
    epoch: int
    row: int


class Reading(NoBody):
    """An island that reads its batches, and learns nothing."""

    def __init__(self, story: Story, island: Incarnation) -> None:
        self._story, self._island, self._step = story, island, 0

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        self._story.read(self._island, self._step, positions)
        self._step += 1


class Story:
    """The run, and what came of it."""

    def __init__(self, run: RunConfig, data: Data) -> None:
        self.data, self.reads = data, list[Read]()
        self.tape: list[dict[str, Any]] = []
        self._records: list[records.Durable] = []
        self._shares = Shares(data.weights)
        self._reader = BatchReader(data.index(run.seed), data.train.fields, LENGTH)
        self._row_of = {
            source[row]["tokens"].tobytes(): (number, row)
            for number, source in enumerate(data.mixed)
            for row in range(len(source))
        }
        assert len(self._row_of) == len(data.train)
        config = policy_config(run, Placement(), "run", (30, 10, 20))
        merging = NoArrays((100,) * FRAGMENTS, (400,) * FRAGMENTS)
        self._lives: collections.Counter[str] = collections.Counter()
        self.world = world = World(
            run,
            config,
            merging,
            report_s=6.0,
            make_body=self._body,
            persist=self._persist,
        )
        for name in FIRST:
            self._start(name, FIRST[name])
        world.clock.at(KILL_S, lambda: world.kill("b"))
        world.clock.at(RETURN_S, lambda: self._start("b", FIRST["b"]))
        world.run(STOP_S)
        for name in FIRST:
            world.islands[name].die()
        world.coordinator.die()
        now = world.clock.now
        state = recovery.recover(config, initial(config), self._records, now)
        world.coordinator = VirtualCoordinator(
            config, world.clock, state, merging, self._persist
        )
        world.coordinator.hear(RunResumed(steps={}))
        for name in OTHERS:
            self._start(name, OTHERS[name])
        world.run(10_000)

    def read(self, island: Incarnation, step: int, positions: np.ndarray) -> None:
        """Note the rows of the batch, as they are read, and the epochs of positions."""
        rows = self._reader.batch(positions)["tokens"]
        for position, tokens in zip(positions, rows, strict=True):
            source, draw = self._shares.draw(int(position))
            epoch = draw // len(self.data.mixed[source])
            found, row = self._row_of[tokens.tobytes()]
            assert found == source
            self.reads.append(Read(island, step, source, epoch, row))

    def merged_steps(self) -> dict[Incarnation, list[set[int]]]:
        """Steps of each incarnation that are in merges, by fragment."""
        found: dict[Incarnation, list[set[int]]] = collections.defaultdict(
            lambda: [set() for _ in range(FRAGMENTS)]
        )
        for record in self.tape:
            for part in record.get("contributions", ()):
                steps = found[part["island"], part["incarnation"]]
                steps[record["fragment"]].update(range(part["start"], part["end"]))
        return found

    def _body(self, name: str) -> Reading:
        self._lives[name] += 1
        return Reading(self, (name, self._lives[name]))

    def _start(self, name: str, batch: int) -> None:
        self.world.start(
            IslandSpec(
                name=name,
                batch_size=batch,
                step_seconds=lambda step: 1.0,
                join_seconds=2.0,
                bytes_up=(100,) * FRAGMENTS,
            )
        )

    def _persist(self, record: records.Durable) -> None:
        self._records.append(record)
        self.tape.append(records.line(record))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder: Path = tmp_path_factory.mktemp("mixture")
    paths = []
    for name, count in zip(("numbers", "letters"), DOCUMENTS, strict=True):
        lines = [f'{{"text": "{name[0]} {n} {n * n}"}}\n' for n in range(count)]
        source = folder / f"{name}.jsonl"
        source.write_text("".join(lines))
        how = Recipe(
            tokenizer=Bytes(),
            reader=Reader(),
            sequence_length=LENGTH,
            validation_fraction=0.05,
        )
        prepare(folder / name, (str(source),), how, workers=1)
        paths.append(str(folder / name))
    run = RunConfig(
        data=DataConfig(paths=tuple(paths), weights=WEIGHTS),
        sync=SyncConfig(
            steps_per_cycle=6, overlap_steps=2, fragments=FRAGMENTS, quorum=1
        ),
        sequence_length=LENGTH,
        total_tokens=ROWS * LENGTH,
    )
    return Story(run, load_data(run))


def test_the_run_ends_with_balanced_books(story):
    coordinator = story.world.coordinator
    assert coordinator.finished
    assert ledger.check(coordinator.state) == []
    lives = {read.island for read in story.reads}
    assert lives == {("a", 1), ("b", 1), ("b", 2), ("a", 2), ("c", 1), ("d", 1)}
    totals = ledger.run_totals(coordinator.config, coordinator.state)
    # The steps of those that died were not all reported.
    assert totals.computed <= LENGTH * len(story.reads)
    assert set(totals.lost) == {"died", "stopped"}


def test_every_row_is_settled_once_in_each_epoch(story):
    merged = story.merged_steps()
    settled = collections.Counter(
        read[2:]
        for read in story.reads
        if read.step in set().union(*merged[read.island])
    )
    assert set(settled.values()) == {1}
    for source, part in enumerate(story.data.mixed):
        assert len(part) > 50
        for epoch in range(2):
            found = {row for s, e, row in settled if (s, e) == (source, epoch)}
            assert found == set(range(len(part))), (source, epoch)


def test_what_is_read_twice_was_lost_in_every_fragment(story):
    merged = story.merged_steps()
    lost = [
        r for r in story.reads if not any(r.step in part for part in merged[r.island])
    ]
    times = collections.Counter(read[2:] for read in story.reads)
    again = {key for key, count in times.items() if count > 1}
    assert again == {read[2:] for read in lost}
    assert sum(times[key] - 1 for key in again) == len(lost)
    # Steps that are in the merge of one fragment alone do not come again.
    some = [
        r for r in story.reads if not all(r.step in part for part in merged[r.island])
    ]
    assert len(some) > len(lost) > 0
    # Before the stop, and because of it.
    assert {read.island for read in lost} == {("b", 1), ("b", 2), ("a", 1)}


def test_the_tape_says_so_too(story):
    assert tape_checks.row_problems(story.tape) == []
    granted = [n for n, r in enumerate(story.tape) if r["kind"] == "granted"]
    for before, after in itertools.pairwise(granted):
        tape = list(story.tape)
        tape[before], tape[after] = tape[after], tape[before]
        assert tape_checks.row_problems(tape), before
    left = next(record for record in story.tape if record["kind"] == "left")
    less = {**left, "in_merges": [[0, left["in_merges"][-1][-1] - 1]]}
    tape = [less if record is left else record for record in story.tape]
    assert any("are in merges" in problem for problem in tape_checks.row_problems(tape))
