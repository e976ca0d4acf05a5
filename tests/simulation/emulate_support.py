"""Configs of two islands to emulate, the books of what came of it, and its tape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import Emulation, EmulationOptions, before_jax, emulate, run_files
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.loading import write_config_json
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import journal
from diloco_jax.data.corpus import load_corpus
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.state import Note, Persist
from diloco_jax.simulation.bodies import StoreMerging
from diloco_jax.simulation.coordinator import Received, VirtualCoordinator, World

CYCLES = 3
BEGUN = 1e6
"""Time at which a tape begins."""


def make_config(text: str, *, steps: int = 16, **sync) -> Config:
    """Islands `a` and `b` do so many steps of a second each, together."""
    settings = {"steps_per_cycle": 4, "fragments": 2, "overlap_steps": 1, "quorum": 2}
    run = RunConfig(
        model=MODEL,
        data=DataConfig(
            paths=(text,),
            validation_fraction=0.2,
            digest=load_corpus((text,), 0.2).digest,
        ),
        inner=InnerConfig(
            learning_rate=1e-2, schedule="constant", warmup_fraction=0, rewarm_steps=0
        ),
        outer=OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
        sync=SyncConfig(**{**settings, **sync}),
        sequence_length=SEQUENCE_LENGTH,
        total_tokens=steps * 6 * SEQUENCE_LENGTH,
    )
    islands = {
        "b": IslandConfig(batch_size=2, step_seconds=1.0),
        "a": IslandConfig(batch_size=4, step_seconds=1.0),
    }
    return Config(run=run, islands=islands)


def with_placement(config: Config, **placement) -> Config:
    return dataclasses.replace(config, placement=Placement(**placement))


def check_books(result: Emulation) -> None:
    """Every token is accounted for, and the history says the same."""
    summary = result.summary
    for part in (summary, *summary["islands"].values()):
        lost = sum(part["tokens_lost"].values())
        assert part["tokens_computed"] == (
            part["tokens_merged"] + lost + part["tokens_in_flight"]
        )
    merges = result.history.merges
    by_fragment = [
        int(merges["contributions"][merges["fragment"] == f].sum()) for f in range(2)
    ]
    assert by_fragment == summary["tokens_merged_by_fragment"]


def record(
    config: Config, options: EmulationOptions, folder: Path, *, unfit: int = 0
) -> Emulation:
    """Emulate, and write config and tape as a coordinator does.

    unfit: number of the delta, from 1, that is said to be unfit; 0: none.
    """
    config, run = resolve(config), config.run
    here = {**before_jax.describe_environment(), "merge_route": "xla"}
    tape = Tape(folder / run_files.TAPE)
    carry_out, recover = VirtualCoordinator.carry_out, World._recover
    receive, received = StoreMerging.receive, list[Any]()

    def write(record: Any, now: float = 0.0) -> None:
        tape.append({**records.line(record), "time": BEGUN + now})

    def recorded(coordinator: VirtualCoordinator, effect: Any) -> None:
        now = coordinator.clock.now
        if isinstance(effect, Persist | Note):
            joined = effect.record
            if isinstance(joined, records.Joined):
                hello = journal.Hello(
                    island=joined.island,
                    incarnation=joined.incarnation,
                    config=dataclasses.asdict(config.islands[joined.island]),
                    environment=here,
                    peer="",
                )
                write(hello, now)
            write(effect.record, now)
        carry_out(coordinator, effect)

    def recovered(world: World) -> None:
        recover(world)
        versions = tuple(f.version for f in world.coordinator.state.fragments)
        of = {"snapshot": 1, "records": 0, "discarded": 0, "environment": here}
        write(journal.Recovered(**of, versions=versions), world.clock.now)
        for fragment, version in enumerate(versions):
            back = journal.FragmentBack(
                fragment=fragment, version=version, snapshot=version, digest=""
            )
            write(back, world.clock.now)

    def judged(merging: StoreMerging, key: Any, encoded: Any) -> Received:
        found = receive(merging, key, encoded)
        received.append(key)
        return found._replace(refusal="non_finite") if len(received) == unfit else found

    plan = build_plan(run, build(run)).digest()
    begun = journal.Begun(
        run_id="r",
        fingerprint=run.fingerprint(),
        plan=plan,
        total_tokens=run.total_tokens,
        environment=here,
    )
    write(begun)
    with (
        mock.patch.object(VirtualCoordinator, "carry_out", recorded),
        mock.patch.object(World, "_recover", recovered),
        mock.patch.object(StoreMerging, "receive", judged),
    ):
        result = emulate(config, options=options)
    tape.close()
    write_config_json(config, folder / run_files.CONFIG)
    return result
