"""Workdirs of runs that took place in virtual time, so that the truth is known."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from diloco_jax import before_jax
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
from diloco_jax.protocol.coordinator.events import Effect, Note, Persist
from diloco_jax.simulation.calibration import prediction
from diloco_jax.simulation.calibration.fit import Calibration, Fitted, Steps
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator

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
    """Return the true values of these runs' fleet."""

    def each(seconds: float) -> dict[str, Fitted]:
        return {name: known(seconds) for name in ("", *made.islands)}

    return Calibration(
        config=made,
        summary={},
        steps={
            name: Steps(island.step_seconds + OVER_S * math.log(2), OVER_S)
            for name, island in made.islands.items()
        },
        start_s=each(2.0),
        join_s=each(5.0),
        compile_s=each(4.0),
        transfer_s=each(0.2),
        away_s=known(8.0),
        outage_s=known(6.0),
    )


def measured(made: Config, seed: int = 1) -> dict[str, Any]:
    """The summary of a run."""
    return prediction.predict_summary(truth(STANDARD), made, seed)


STANDARD = config()
HERE = before_jax.describe_environment()
RECOVERED = notes.Recovered(
    snapshot=0,
    snapshot_versions=(),
    records=0,
    discarded=0,
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
    attendances = []

    class RecordedWorld(prediction._World):
        def write(self, note: notes.Note) -> None:
            tape.append({**records.line(note), "time": BEGUN + self.clock.now})

        def _recover(self) -> None:
            self.write(RECOVERED)
            super()._recover()
            self.write(notes.Compiled())

    class RecordedAttendance(prediction._Attendance):
        def close(self) -> None:
            super().close()
            attendances.append(self)

    carry_out = VirtualCoordinator.carry_out

    def recorded(coordinator: VirtualCoordinator, effect: Effect) -> None:
        if isinstance(effect, Persist | Note):
            line = records.line(effect.record)
            tape.append({**line, "time": BEGUN + coordinator.clock.now})
        carry_out(coordinator, effect)

    begun = notes.Begun(
        run_id="r",
        fingerprint=made.run.fingerprint(),
        plan="",
        total_tokens=made.run.total_tokens,
        environment=HERE,
    )
    tape.append({**records.line(begun), "time": BEGUN})
    with (
        mock.patch.object(prediction, "_World", RecordedWorld),
        mock.patch.object(prediction, "_Attendance", RecordedAttendance),
        mock.patch.object(VirtualCoordinator, "carry_out", recorded),
    ):
        fleet = dataclasses.replace(truth(STANDARD), **true)
        summary = prediction.predict_summary(fleet, made, seed)
    tape.close()
    write_config_json(made, workdir / "config.json")
    write_json({"run_id": "r", "begun_unix": BEGUN}, workdir / "run.json")
    write_json(summary, workdir / "summary.json")
    roster = Roster(workdir / "roster.msgpack")
    roster.members = attendances[0].roster().members
    for member in roster.members.values():
        member.first_seen += BEGUN
        member.last_seen += BEGUN
        member.active = [(a + BEGUN, b + BEGUN) for a, b in member.active]
        member.current = msgspec.structs.replace(
            member.current,
            first_step_unix=member.current.first_step_unix + BEGUN,
            last_step_unix=member.current.last_step_unix + BEGUN,
        )
    roster.save()
    return summary
