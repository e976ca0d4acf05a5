"""Workdirs of runs that took place in virtual time, so that the truth is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from diloco_jax import environment
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator import notes
from diloco_jax.coordinator.roster import Roster
from diloco_jax.files import write_json
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Effect, Merge, Note, Persist
from diloco_jax.simulation.calibration import prediction
from diloco_jax.simulation.calibration.fit import Calibration, Fitted, Steps
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator
from diloco_jax.simulation.virtual.island import IslandSpec, VirtualIsland
from diloco_jax.simulation.virtual.mortal import MortalWorld

BEGUN = 1e6
STEP_S = {"a": 0.5, "b": 0.7, "c": 1.3}
OVER_S = 0.02
"""By which steps are longer than they are told to be, on average."""


def config(**changes: Any) -> Config:
    """Three islands, one of which is killed, as is the coordinator."""
    run = RunConfig(
        model=ModelConfig(
            d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
        ),
        data=DataConfig(digest="d"),
        outer=OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0),
        sync=SyncConfig(steps_per_cycle=6, fragments=3, quorum=2),
        sequence_length=8,
        total_tokens=20_000,
    )
    islands = {
        name: IslandConfig(batch_size=2, step_seconds=step_s)
        for name, step_s in changes.pop("step_s", STEP_S).items()
    }
    faults = changes.pop("faults", ("b@60:kill", "coordinator@50:kill"))
    placement = Placement(faults=faults, restarts=changes.pop("restarts", 5))
    return Config(
        run=dataclasses.replace(run, **changes), islands=islands, placement=placement
    ).validate()


def known(seconds: float) -> Fitted:
    return Fitted(seconds, seconds, seconds, 1)


def truth(made: Config) -> Calibration:
    """What the fleet of these runs is like."""
    over = np.random.default_rng(0).exponential(OVER_S, 200)

    def each(seconds: float) -> dict[str, Fitted]:
        return {name: known(seconds) for name in ("", *made.islands)}

    return Calibration(
        run=made.run,
        steps={
            name: Steps(island=island, seconds=island.step_seconds + over, held_up=0)
            for name, island in made.islands.items()
        },
        latency_s=each(0.03),
        up_s=each(0.2),
        down_s=each(0.1),
        start_s=each(2.0),
        compile_s=each(4.0),
        join_s=each(5.0),
        rejoin_s=each(3.0),
        restart_s=known(1.5),
        merge_s=known(0.04),
        compiled_s=known(6.0),
        recompiled_s=known(2.5),
        outage_s=known(6.0),
        resume_s=known(0.3),
        leaving_s=0.0,
        closing_s=1.0,
    )


def measured(made: Config, seed: int = 1) -> dict[str, Any]:
    """The summary of a run."""
    return prediction.Prediction(truth(STANDARD), made, seed).summary()


STANDARD = config()
HERE = environment.describe()
RECOVERED = notes.Recovered(
    snapshot=0,
    snapshot_merges=0,
    records=0,
    versions=(),
    parameters_digest="",
    environment=HERE,
)


def record(
    workdir: Path, made: Config = STANDARD, seed: int = 1, **true: Fitted
) -> dict[str, Any]:
    """Leaves in the workdir what a run leaves there; returns its summary. true: of the
    fleet, where it is not as usual."""
    workdir.mkdir(exist_ok=True)
    tape = Tape(workdir / "tape.jsonl")
    metrics = []

    class RecordedWorld(MortalWorld):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.clock.at(settings["compiled_s"], lambda: self.write(notes.Compiled()))

        def write(self, note: notes.Note) -> None:
            tape.append({**records.line(note), "time": BEGUN + self.clock.now})

        def start(self, spec: IslandSpec) -> VirtualIsland:
            before = self.islands.get(spec.name)
            number = before.incarnation + 1 if before is not None else 1
            who = {"island": spec.name, "incarnation": number}
            here = {"config": {}, "environment": HERE, "peer": ""}
            self.write(notes.Hello(**who, **here))
            return super().start(spec)

        def _recover(self) -> None:
            self.write(RECOVERED)
            super()._recover()
            self.clock.after(self._recompiled_s, lambda: self.write(notes.Compiled()))

        def _merge_time(self, merge: Merge) -> float:
            seconds = super()._merge_time(merge)
            what = {"fragment": merge.fragment, "version": merge.version.number}
            metrics.append({"kind": "merge", **what, "seconds": seconds})
            return seconds

    carry_out = VirtualCoordinator.carry_out

    def recorded(coordinator: VirtualCoordinator, effect: Effect) -> None:
        if isinstance(effect, Persist | Note):
            line = records.line(effect.record)
            tape.append({**line, "time": BEGUN + coordinator.clock.now})
        carry_out(coordinator, effect)

    begun = notes.Begun(
        run_id="r", fingerprint=made.run.fingerprint(), plan="", environment=HERE
    )
    tape.append({**records.line(begun), "time": BEGUN})
    with (
        mock.patch.object(prediction, "MortalWorld", RecordedWorld),
        mock.patch.object(VirtualCoordinator, "carry_out", recorded),
    ):
        fleet = dataclasses.replace(truth(STANDARD), **true)
        played = prediction.Prediction(fleet, made, seed)
        summary = played.summary()
    tape.close()
    write_config_json(made, workdir / "config.json")
    write_json({"run_id": "r", "begun_unix": BEGUN}, workdir / "run.json")
    write_json(summary, workdir / "summary.json")
    roster = Roster(workdir / "roster.msgpack")
    roster.members = played._attendance.roster().members
    for member in roster.members.values():
        member.last_seen += BEGUN
    roster.save()
    text = "".join(json.dumps(line) + "\n" for line in metrics)
    (workdir / "metrics.jsonl").write_text(text)
    return summary
