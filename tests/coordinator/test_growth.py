"""Nothing that a coordinator or an island keeps in memory grows with a run's length."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from diloco_jax.config import Placement, RunConfig, SyncConfig
from diloco_jax.coordinator.journal import Journal
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.faults import parse_faults
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator.state import Said
from diloco_jax.protocol.messages import Hello, Measures, Report
from diloco_jax.simulation.clock import LineSpeed
from diloco_jax.simulation.coordinator import NoArrays, World
from diloco_jax.simulation.island import IslandSpec

FRAGMENTS, STEPS_PER_CYCLE = 6, 6
MERGES, WARM_UP, LOOKED_AT = 3000, 600, 50
"""Merges in all; merges until every list has its length; merges between two looks."""
STEP_S = {"a": 1.0, "b": 1.1, "c": 1.3, "slow": 7.0}
OURS = ("diloco_jax.protocol", "diloco_jax.coordinator", "diloco_jax.data")


def elements(thing: Any, seen: set[int] | None = None) -> int:
    """Count what a value holds, down to its numbers: unlike its bytes, this does not
    grow with the numbers themselves."""
    seen = set() if seen is None else seen
    inside = list(parts(thing))
    if inside and id(thing) in seen:
        return 0
    seen.add(id(thing))
    return 1 + sum(elements(part, seen) for part in inside)


def parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from itertools.chain(thing.keys(), thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset, collections.deque)):
        yield from thing
    elif isinstance(thing, msgspec.Struct):
        yield from (getattr(thing, name) for name in thing.__struct_fields__)
    elif type(thing).__module__.startswith(OURS):
        yield from vars(thing).values()


class Run:
    """Islands, of which one is killed now and then, and what the service keeps."""

    def __init__(self, folder) -> None:
        sync = SyncConfig(
            steps_per_cycle=STEPS_PER_CYCLE,
            overlap_steps=2,
            fragments=FRAGMENTS,
            quorum=2,
        )
        run = RunConfig(sync=sync, sequence_length=10, total_tokens=1 << 60)
        placement = Placement(time_budget_s=50.0, outage_budget_s=20.0)
        sizes = (100,) * FRAGMENTS
        self.config = policy_config(run, placement, "growth", sizes)
        self.tape = Tape(folder / "tape.jsonl")
        self.journal = Journal(
            collections.deque(maxlen=1),  # A log, but for what it forgets.
            self.tape,
            faults=parse_faults((), {}),
            merges=0,
            slow_s=1e9,
        )
        self.roster = Roster()
        self.world = World(
            run,
            self.config,
            NoArrays(bytes_down=sizes, bytes_full=sizes),
            report_s=5.0,
            line_speed=LineSpeed(latency_s=0.01),
            alert=self.journal.alert,
            merge_seconds=lambda merge: 0.1,
        )
        self.world.coordinator._persist = self.journal.persist
        self._decide = self.world.coordinator.decide
        self.world.coordinator.decide = self.decide
        for name in STEP_S:
            self.start(name)

    def start(self, name: str) -> None:
        self.world.start(
            IslandSpec(
                name=name,
                batch_size=1,
                step_seconds=lambda _: STEP_S[name],
                bytes_up=(100,) * FRAGMENTS,
            )
        )

    def decide(self, event, now):
        effects = self._decide(event, now)
        for effect in effects:
            if type(effect).__name__ == "Ignored":
                self.journal.ignored(effect)
        if isinstance(event, Hello):
            self.roster.hello(event, now)
        if isinstance(event, Said) and isinstance(event.message, Report):
            steps = event.message.steps
            measures = Measures(steps=steps, first_step_unix=now, last_step_unix=now)
            self.roster.report(event.island, measures, event.message.records, now)
        return effects

    @property
    def merges(self) -> int:
        return sum(f.merges for f in self.world.coordinator.state.fragments)

    def sizes(self) -> dict[str, int]:
        """Elements that each part holds now."""
        state = self.world.coordinator.state
        found = {
            "state": elements(state),
            "state, islands": elements(state.islands),
            "roster": elements(self.roster.members),
            "alerts": elements(self.journal.alerts),
            "ignored": elements(self.journal.ignored_messages),
        }
        for name, island in self.world.islands.items():
            found[f"{name}: conversation"] = elements(island._conversation)
            found[f"{name}: boundary"] = elements(island.boundary)
            found[f"{name}: positions"] = elements(island.positions)
        return found


def test_what_is_kept_does_not_grow_after_the_warm_up(tmp_path):
    run = Run(tmp_path)
    looks, lives = [], 0
    while run.merges < MERGES:
        before = run.merges
        run.world.run(run.world.clock.now + LOOKED_AT)
        assert run.merges > before
        looks.append(run.sizes())
        if lives < run.merges // 200:
            lives += 1
            run.world.kill("b")
            run.start("b")
    run.tape.close()
    assert lives >= 10
    seen = ("state", "roster", "a: conversation", "a: boundary")
    assert min(looks[-1][name] for name in seen) > 50, "what is kept is looked into"
    warm = len(looks) * WARM_UP // MERGES
    for name in looks[0]:
        most = max(look[name] for look in looks[:warm])
        later = max(look[name] for look in looks[warm:])
        # Its length depends on the moment, but not on the age of the run.
        assert later <= 1.1 * most + 10, (name, most, [look[name] for look in looks])
