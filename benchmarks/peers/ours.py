"""The same work as a run of this package, with its faults by (who, step)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import support
from support import Run

from benchmarks.peers.work import Merge, Outcome, Work, useful_tokens
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
from diloco_jax.models.presets import preset

TIMEOUT_S = 400.0
SYSTEM = "diloco_jax"


def run(work: Work, folder: Path) -> Outcome:
    """Run the work; files go into the folder. Raises support.RunError if it fails."""
    config = config_of(work)
    done = support.run_in(config, folder, TIMEOUT_S)
    return _outcome(work, done)


def config_of(work: Work) -> Config:
    """Return the work as a config: mean of the deltas, Nesterov, f32 on the wire."""
    tokens = round(work.seconds * work.capacity)
    run = RunConfig(
        model=preset("tiny"),
        data=DataConfig(validation_fraction=0.005),
        inner=InnerConfig(learning_rate=work.learning_rate, schedule="constant"),
        outer=OuterConfig(
            optimizer="nesterov",
            learning_rate=work.outer_learning_rate,
            momentum=work.outer_momentum,
        ),
        sync=SyncConfig(
            steps_per_cycle=work.steps_per_cycle,
            fragments=work.fragments,
            quorum=max(1, work.replicas - 1),
            merge="mean",
            codec_up="f32",
            codec_down="f32",
        ),
        sequence_length=work.sequence,
        total_tokens=tokens,
    )
    islands = {
        name: IslandConfig(batch_size=work.batch, step_seconds=work.pace(name))
        for name in work.names
    }
    # As many merges as there are ticks until the step.
    merge = round(work.fault_step / work.steps_per_cycle * work.fragments)
    faults: dict[str, tuple[str, ...]] = {
        "killed": (f"{work.victim}@{work.fault_step}:kill",),
        "coordinator lost": (f"coordinator@{merge}:kill",),
    }
    lost = work.scenario == "coordinator lost"
    placement = Placement(
        faults=faults.get(work.scenario, ()),
        restart_delay_s=work.outage_s if lost else 1.0,
    )
    return Config(run=run, islands=islands, placement=placement).validate()


def _outcome(work: Work, done: Run) -> Outcome:
    summary = done.summary
    islands = summary["islands"]
    sizes = support.fragment_sizes(done.config)
    began, ended = done.window()
    merges = [
        Merge(
            record["time"],
            {
                part["island"]: part["tokens"] * sizes[record["fragment"]] / sum(sizes)
                for part in record["contributions"]
            },
        )
        for record in done.tape
        if record["kind"] == "merged" and not record["final"]
    ]
    rate = useful_tokens(merges, began, ended) / (ended - began)
    gap = max(islands[name]["max_step_gap_seconds"] for name in work.survivors)
    joins = {name: islands[name]["joins"] for name in work.names}
    expected = {
        name: 2 if work.scenario == "killed" and name == work.victim else 1
        for name in work.names
    }
    return Outcome(
        system=SYSTEM,
        version=f"jax {importlib.metadata.version('jax')}",
        scenario=work.scenario,
        replicas=work.replicas,
        parameters=summary["parameters"],
        useful_per_second=rate,
        capacity=work.capacity,
        longest_gap_steps=gap / work.step_seconds,
        went_on=all(joins[name] == 1 for name in work.survivors)
        and summary["phase"] == "done",
        ended=sum(max(0, joins[name] - expected[name]) for name in work.names),
        tokens_lost=float(sum(summary["tokens_lost"].values())),
        bytes_loopback=None,
        tokens_useful=float(summary["tokens_merged"]),
        loss=summary["eval_loss"],
    )
