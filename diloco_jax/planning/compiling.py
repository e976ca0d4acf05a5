"""One island of a config, compiled for its slice in a process of its own.

`python -m diloco_jax.planning.compiling CONFIG_JSON ISLAND` prints one JSON object per
line on standard output: its progress, and last the `IslandPlan`. Messages of libtpu go
to standard error. No TPU is touched, and no array is made.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax

from diloco_jax.config import Config, ConfigError, IslandConfig, RunConfig
from diloco_jax.config.loading import read_config
from diloco_jax.core.fragments import FragmentPlan, Piece
from diloco_jax.hardware.chips import chip_of
from diloco_jax.hardware.slices import Slice, slice_of
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.kinds import Kind, alike, kind_of
from diloco_jax.island.device.step import Trainer, TrainState
from diloco_jax.models.build import build_plan
from diloco_jax.models.flops import Flops, count_flops
from diloco_jax.planning import hlo, memory, traffic
from diloco_jax.planning.collectives import (
    CollectiveSum,
    find_collectives,
    sum_collectives,
)
from diloco_jax.planning.memory import Hbm
from diloco_jax.planning.roofline import Roofline, ici_seconds, roofline
from diloco_jax.planning.workers import tell

FUNCTIONS = ("take", "gather", "arrive")
"""Functions of `Kind` that every tick runs; "gather" where hosts fetch parts."""
Report = Callable[[str, int, int], None]
"""Callback (current work, parts done, parts in all)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Takes and adoptions of one kind of piece."""

    piece: str
    """Name of one piece of this kind."""
    pieces: int
    """Number of pieces of this kind."""
    aligned: bool
    """True if shards end on tiles, so that nothing needs to be gathered."""
    collectives: dict[str, list[CollectiveSum]]
    """Collectives by function; functions without any are left out."""
    seconds: float
    """Seconds of these functions for one piece, at published rates: arithmetic. They
    wait for their turn among the steps, and no step runs meanwhile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandPlan:
    """Plan of one island: what the compiler reports, and what follows from it."""

    topology: str
    chips: int
    hosts: int
    tokens_per_step: int
    fits: bool
    refusal: str
    """The compiler's message if the step does not fit."""
    hbm: Hbm
    flops: Flops
    hbm_traffic_bytes: int | None
    """Bytes per chip and step; None, as for collectives, if nothing compiled."""
    collectives: list[CollectiveSum] | None
    exchange: list[ExchangePlan]
    roofline: Roofline

    @property
    def exchange_seconds(self) -> float:
        """Seconds of a cycle in which takes and adoptions hold up the steps."""
        return sum(kind.pieces * kind.seconds for kind in self.exchange)


def plan_island(config: Config, name: str, report: Report) -> IslandPlan:
    """Compile the step, takes and adoptions of an island.

    Raises ConfigError, or the compiler's error if it is not about memory.
    """
    run, island = config.run, config.islands[name]
    found = slice_of(name, island)
    report("tracing", 0, 1)
    model, trainer = build_trainer(run, island, _devices(found))
    plan, state = build_plan(run, model), trainer.abstract_state()
    kinds = _kinds(run, island, plan, state)
    parts = 2 + len(kinds)
    report("counting", 0, parts)
    flops = count_flops(run, island)
    report("step", 1, parts)
    held = memory.resident(
        plan,
        run.sync,
        state,
        {piece: kind for kind, pieces in kinds for piece in pieces},
        in_host_memory=island.anchor_memory == "pinned_host",
        watched_dtype=island.compute_dtype if config.placement.watch_every else None,
    )
    compiled, refusal = _compile_step(trainer, run.sequence_length, held.beside)
    exchange = []
    for done, (kind, pieces) in enumerate(kinds):
        report(pieces[0].name, 2 + done, parts)
        exchange.append(_plan_exchange(run, found, kind, pieces, state))
    return _conclude(found, run, island, held, flops, compiled, refusal, exchange)


def _conclude(
    found: Slice,
    run: RunConfig,
    island: IslandConfig,
    held: memory.Resident,
    flops: Flops,
    compiled: Any,
    refusal: str,
    exchange: list[ExchangePlan],
) -> IslandPlan:
    moved: int | None = None
    collectives: list[CollectiveSum] | None = None
    if compiled is None:
        hbm = memory.refused(held, refusal)
        assert hbm, "refusals without figures are raised"
    else:
        program = _program(compiled)
        moved = traffic.hbm_bytes(program)
        collectives = sum_collectives(find_collectives(program))
        available = chip_of(found).hbm_bytes
        hbm = memory.accepted(held, compiled.memory_analysis(), available)
    return IslandPlan(
        topology=found.topology,
        chips=found.chips,
        hosts=found.hosts,
        tokens_per_step=island.batch_size * run.sequence_length,
        fits=compiled is not None,
        refusal=refusal,
        hbm=hbm,
        flops=flops,
        hbm_traffic_bytes=moved,
        collectives=collectives,
        exchange=exchange,
        roofline=roofline(
            found,
            model_flops=flops.model,
            executed_flops=flops.executed,
            hbm_bytes=moved or 0,
            collectives=collectives or [],
        ),
    )


def _compile_step(trainer: Trainer, length: int, beside: int) -> tuple[Any, str]:
    """Return the compiled step, or None and the first lines of the refusal."""
    lowered = trainer.lower(length, beside)
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        if not memory.REFUSAL.search(str(error)):
            raise
        return None, "\n".join(str(error).splitlines()[:3])


def _kinds(
    run: RunConfig, island: IslandConfig, plan: FragmentPlan, state: TrainState
) -> list[tuple[Kind, list[Piece]]]:
    """Group the pieces for which the compiler makes the same programs."""
    kinds: dict[Any, tuple[Kind, list[Piece]]] = {}
    for piece in sorted(plan.pieces):
        leaf = _leaf(state, piece)
        key = (leaf.shape, leaf.sharding, *alike(piece))
        if key not in kinds:
            kind = kind_of(run.sync, piece, leaf, island.anchor_memory)
            kinds[key] = (kind, [])
        kinds[key][1].append(piece)
    return list(kinds.values())


def _plan_exchange(
    run: RunConfig, found: Slice, kind: Kind, pieces: list[Piece], state: TrainState
) -> ExchangePlan:
    piece = pieces[0]
    lowered = kind.lower(run.sync, piece, _leaf(state, piece))
    programs = {
        name: _program(lowered[name].compile()) for name in FUNCTIONS if name in lowered
    }
    collectives = {
        name: sum_collectives(find_collectives(program))
        for name, program in programs.items()
    }
    sent = sum(c.sent_bytes for sums in collectives.values() for c in sums)
    moved = sum(map(traffic.hbm_bytes, programs.values()))
    return ExchangePlan(
        piece=piece.name,
        pieces=len(pieces),
        aligned=_cuts(kind.piece.spec) == _cuts(kind.encoded.spec),
        collectives={name: sums for name, sums in collectives.items() if sums},
        seconds=ici_seconds(found, sent) + moved / chip_of(found).hbm_bytes_per_s,
    )


def _program(compiled: jax.stages.Compiled) -> hlo.Program:
    text = compiled.as_text()
    assert text, "compilers of devices have a text"
    return hlo.parse(text)


def _cuts(spec: Any) -> list[Any]:
    return [axis for axis in spec if axis]


def _leaf(state: TrainState, piece: Piece) -> Any:
    node: Any = state.params
    for key in piece.path:
        node = node[key]
    return node


def _devices(found: Slice) -> Any:
    """Return the devices of a slice that this machine does not have."""
    from jax.experimental import topologies

    facts: dict[str, Any] = {"topology_name": found.topology}
    if found.hosts == 1:  # libtpu takes it that each host has 2x2 chips.
        facts["chips_per_host_bounds"] = (*found.axes, 1)[:3]
    return topologies.get_topology_desc(platform="tpu", **facts).devices


def main(arguments: list[str]) -> None:
    """Print the lines that the module's docstring describes."""
    path, name = arguments

    def report(doing: str, done: int, parts: int) -> None:
        tell({"doing": doing, "done": done, "parts": parts})

    try:
        plan = plan_island(read_config(path), name, report)
        tell({"result": dataclasses.asdict(plan)})
    except ConfigError as error:
        tell({"config_error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
