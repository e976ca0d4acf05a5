"""Islands of a config, each compiled for its slice in a process of its own, two at a
time.

libtpu reads its flags once, writes to standard error and may abort, so it must not run
in the process that plans; one that hangs must be killed, and its exit code told, which
pools of the standard library cannot do. Equal islands are compiled once.

`python -m diloco_jax.planning.compiling CONFIG_JSON ISLAND` prints one JSON object per
line on standard output: `{"done"}` is the share that is done, `{"result"}` the last
line, an `IslandPlan`, `{"config_error"}` a refusal. No TPU is touched, and no array is
made.

Whether it fits HBM is the compiler's own word. The fastest possible step follows from
published rates of the chips. Each resource has a time of its own. Work that overlaps
costs as much time as the longest part. Collectives that the compiler did not make
asynchronous come on top, because the chip waits for them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from diloco_jax import run_files
from diloco_jax.before_jax import (
    FLAG_LISTS,
    generation_of,
    libtpu_flags_in_force,
    prepare_environment,
    set_libtpu_flags,
)
from diloco_jax.config import Config, ConfigError, IslandConfig, RunConfig, SyncConfig
from diloco_jax.config.loading import read_config, write_config_json
from diloco_jax.config.placement import variables_of
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import FragmentPlan, Piece
from diloco_jax.core.members import importable
from diloco_jax.hardware.tpus import Slice, ici_bytes_per_s, slice_of
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.mesh import abstract_mesh
from diloco_jax.island.device.programs import PiecePrograms, piece_sharding
from diloco_jax.island.device.step import TrainState, abstract_state
from diloco_jax.models.build import build, build_inner, build_plan
from diloco_jax.models.flops import Flops, count_flops
from diloco_jax.models.model import Params
from diloco_jax.planning.program import (
    CollectiveSum,
    Program,
    hbm_bytes,
    parse,
    sum_collectives,
)

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
AMOUNT = r"([\d.]+)([KMGT]?)"
REFUSAL = re.compile(rf"{AMOUNT}\)? exceeds available HBM \(?{AMOUNT}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hbm:
    """Bytes in the HBM of one device, unless a field says otherwise."""

    parameters: int
    """Those that are frozen, too."""
    optimizer: int
    watched: int
    """The copy of the merged model, in the compute dtype, with
    `placement.watch_every`."""
    anchors: int
    residuals: int
    """Residuals of the error feedback."""
    open_takes: int
    """Bases, and residuals as they were at the take, of the fragments under way."""
    late_takes: int
    """The same for all other fragments, if every delta of the island misses its merge.
    No other figure counts these bytes, so there must be room for them as well.
    """
    temporaries: int | None = None
    """Activations, gradients and gathered weights: the compiler's share beyond the
    fields above. None if the compiler refuses the step.
    """
    used: int = 0
    """All bytes used, as the compiler reports them."""
    available: int = 0
    missing: int = 0
    """Bytes by which the step does not fit; 0 if it fits."""
    pinned_host: int
    """Bytes of anchors, residuals and takes, if they lie in the device's share of its
    host's memory."""

    @property
    def beside(self) -> int:
        """Bytes in HBM that a step does not touch."""
        exchange = self.anchors + self.residuals + self.open_takes
        return self.watched + (0 if self.pinned_host else exchange)

    @property
    def resting(self) -> int:
        """Bytes in HBM between steps."""
        return self.parameters + self.optimizer + self.beside

    @property
    def share_of_activations(self) -> float:
        """The share of the activations for which there is room, with everything else
        that grows with the batch; at most 1.
        """
        resident = self.used - self.resting
        return min(1.0, 1 - self.missing / max(1, resident))

    def accepted(self, stats: Any, available: int) -> Hbm:
        """Return the memory of a step that compiled.

        stats: `Compiled.memory_analysis()`.
        """
        used = stats.peak_memory_in_bytes + stats.generated_code_size_in_bytes
        return dataclasses.replace(
            self,
            temporaries=used - self.resting,
            used=used,
            available=available,
            missing=max(0, used - available),
        )

    def refused(self, message: str) -> Hbm | None:
        """Return the memory of a step that the compiler refused; None if HBM was not
        the reason."""
        found = REFUSAL.search(message)
        if not found:
            return None
        used, available = (int(float(found[i]) * UNITS[found[i + 1]]) for i in (1, 3))
        missing = max(0, used - available)
        return dataclasses.replace(
            self, used=used, available=available, missing=missing
        )


def held_between_steps(
    plan: FragmentPlan,
    sync: SyncConfig,
    state: Any,
    frozen: Any,
    lies: Mapping[Piece, NamedSharding],
    *,
    in_host_memory: bool,
    watched_dtype: str | None = None,
) -> Hbm:
    """Compute what an island holds from shapes and shardings alone.

    state, frozen: of `abstract_state`. lies: see `piece_sharding`. watched_dtype: of
    the merged model's copy; None: there is none.
    """
    size = np.dtype(np.float32).itemsize
    share = {
        piece: math.prod(own.shard_shape(piece.shape)) * size
        for piece, own in lies.items()
    }
    anchors = sum(share.values())
    largest = max(sum(share[p] for p in pieces) for pieces in plan.fragments)
    feedback = bool(sync.error_feedback)
    under_way = largest * open_fragments(sync)
    residuals, open_takes = anchors * feedback, under_way * (1 + feedback)
    is_late = ADOPT_RULES.find(sync.adopt).keeps_pending + feedback
    return Hbm(
        parameters=_bytes(state.params) + _bytes(frozen),
        optimizer=_bytes(state.opt_state),
        watched=_bytes(state.params, watched_dtype) if watched_dtype else 0,
        anchors=anchors,
        residuals=residuals,
        open_takes=open_takes,
        late_takes=max(0, anchors - under_way) * is_late,
        pinned_host=in_host_memory * (anchors + residuals + open_takes),
    )


def least_hbm(
    config: Config,
    name: str,
    plan: FragmentPlan,
    laid: tuple[TrainState, Params] | None = None,
) -> Hbm:
    """Compute what an island holds between steps from its config alone: no step takes
    less. Its slice and chips play no part.

    laid: `abstract_state` of the island; None: of the bundled model. Raises
    ConfigError: see `build`.
    """
    run, island = config.run, config.islands[name]
    # Plans try many settings of the exchange, and no shape depends on those.
    known = dataclasses.replace(run, sync=SyncConfig())
    state, frozen = laid or _laid_out(known, island)
    lies: dict[tuple[Any, ...], NamedSharding] = {}
    for piece in plan.pieces:
        kind = (piece.path, piece.layer >= 0, piece.shape)
        if kind not in lies:
            lies[kind] = piece_sharding(piece, _leaf(state, piece))
    return held_between_steps(
        plan,
        run.sync,
        state,
        frozen,
        {p: lies[p.path, p.layer >= 0, p.shape] for p in plan.pieces},
        in_host_memory=island.anchor_memory == "pinned_host",
        watched_dtype=island.compute_dtype if config.placement.watch_every else None,
    )


@functools.lru_cache(maxsize=64)
def _laid_out(run: RunConfig, island: IslandConfig) -> tuple[TrainState, Params]:
    model = build(run, island)
    return abstract_state(model, build_inner(run, model), abstract_mesh(island))


def open_fragments(sync: SyncConfig) -> int:
    """Count the fragments that an island has taken and not adopted yet.

    One fragment is taken every H / P steps and adopted tau steps later. An adoption
    that is late, because its merge waited for other islands, counts as a late take.
    """
    under_way = math.ceil(sync.overlap * sync.fragments / sync.cycle)
    return min(max(1, under_way), sync.fragments)


def _bytes(tree: Any, dtype: str | None = None) -> int:
    """Bytes of the shards that one chip holds, in their own dtype or in another."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        * jnp.dtype(dtype or leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


Resource = Literal["compute", "hbm", "ici"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one step by resource, and the rates that follow."""

    compute_seconds: float
    hbm_seconds: float
    ici_seconds: float
    """Seconds of all collectives."""
    waiting_seconds: float
    """Seconds of the collectives that overlap with nothing, part of `ici_seconds`."""
    binding: Resource
    """The resource that takes longest."""
    step_seconds: float
    """The longest of the overlapping times plus the waiting time."""
    model_flops_utilisation: float
    """Share of the peak rate that forward and backward pass reach in that step."""


def roofline(
    found: Slice,
    *,
    model_flops: float,
    executed_flops: float,
    hbm_bytes: int,
    collectives: list[CollectiveSum],
) -> Roofline:
    """Return the roofline of one step.

    flops: of the whole island; bytes: of one device.
    """
    sent = sum(c.sent_bytes for c in collectives)
    hidden = sum(c.overlapping_bytes for c in collectives)
    seconds: dict[Resource, float] = {
        "compute": executed_flops / found.flops_per_s,
        "hbm": hbm_bytes / found.hbm_bytes_per_s,
        "ici": ici_seconds(found, sent),
    }
    waiting = ici_seconds(found, sent - hidden)
    overlapped = seconds["ici"] - waiting
    step = max(seconds["compute"], seconds["hbm"], overlapped) + waiting
    return Roofline(
        compute_seconds=seconds["compute"],
        hbm_seconds=seconds["hbm"],
        ici_seconds=seconds["ici"],
        waiting_seconds=waiting,
        binding=max(seconds, key=lambda name: seconds[name]),
        step_seconds=step,
        model_flops_utilisation=model_flops / found.flops_per_s / step,
    )


def ici_seconds(found: Slice, sent_bytes: float) -> float:
    """Return the seconds in which a device sends this many bytes over all its links."""
    return sent_bytes / ici_bytes_per_s(found) if sent_bytes else 0.0


FUNCTIONS = ("take", "gather", "arrive")
"""`PiecePrograms` that every tick runs; "gather" where hosts fetch parts."""
Report = Callable[[float], None]
"""Callback (share that is done)."""


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
    fits: bool
    refusal: str
    """The compiler's message if the step does not fit."""
    hbm: Hbm
    flops: Flops
    hbm_traffic_bytes: int | None
    """Bytes per device and step; None, as for collectives, if nothing compiled."""
    collectives: list[CollectiveSum] | None
    exchange: list[ExchangePlan]
    roofline: Roofline
    compile_seconds: float = 0.0
    """Seconds in which this machine traced and compiled all of it."""

    @property
    def exchange_seconds(self) -> float:
        """Seconds of a cycle in which takes and adoptions hold up the steps."""
        return sum(kind.pieces * kind.seconds for kind in self.exchange)

    def with_memory(self, octets: float) -> IslandPlan:
        """Return the plan for devices whose programs may have so many bytes."""
        missing = max(self.hbm.missing, self.hbm.used - int(octets))
        hbm = dataclasses.replace(self.hbm, available=int(octets), missing=missing)
        return dataclasses.replace(self, hbm=hbm, fits=self.fits and not missing)


def plan_island(config: Config, name: str, report: Report) -> IslandPlan:
    """Compile the step, takes and adoptions of an island.

    Raises ConfigError, or the compiler's error if it is not about memory.
    """
    run, island, began = config.run, config.islands[name], time.monotonic()
    found = slice_of(name, island)
    model, trainer = build_trainer(run, island, _devices(found))
    plan, state = build_plan(run, model), trainer.abstract_state()
    kinds = _kinds(run, island, plan, state)
    parts, flops = 2 + len(kinds), count_flops(run, island)
    report(1 / parts)
    hbm = least_hbm(
        config, name, plan, abstract_state(model, trainer.inner, trainer.mesh)
    )
    lowered, refusal = trainer.lower(run.sequence_length, hbm.beside), ""
    moved: int | None = None
    collectives: list[CollectiveSum] | None = None
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        without = hbm.refused(str(error))
        if without is None:
            raise
        hbm, refusal = without, "\n".join(str(error).splitlines()[:3])
    else:
        program = _program(compiled)
        moved, collectives = hbm_bytes(program), sum_collectives(program)
        hbm = hbm.accepted(compiled.memory_analysis(), found.hbm_bytes)
    exchange = []
    for done, (kind, pieces) in enumerate(kinds.items()):
        report((2 + done) / parts)
        exchange.append(_plan_exchange(found, kind, pieces))
    return IslandPlan(
        topology=found.topology,
        fits=not refusal,
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
        compile_seconds=time.monotonic() - began,
    )


def _kinds(
    run: RunConfig, island: IslandConfig, plan: FragmentPlan, state: TrainState
) -> dict[PiecePrograms, list[Piece]]:
    """Group the pieces that share their programs."""
    kinds: dict[PiecePrograms, list[Piece]] = {}
    for piece in sorted(plan.pieces):
        leaf, memory = _leaf(state, piece), island.anchor_memory
        programs = PiecePrograms.of(run.sync, piece, leaf, memory)
        kinds.setdefault(programs, []).append(piece)
    return kinds


def _plan_exchange(
    found: Slice, kind: PiecePrograms, pieces: list[Piece]
) -> ExchangePlan:
    programs = {
        name: _program(kind.lower(name).compile())
        for name in FUNCTIONS
        if name in kind.names
    }
    collectives = {name: sum_collectives(p) for name, p in programs.items()}
    sent = sum(c.sent_bytes for sums in collectives.values() for c in sums)
    moved = sum(map(hbm_bytes, programs.values()))
    return ExchangePlan(
        piece=pieces[0].name,
        pieces=len(pieces),
        aligned=_cuts(kind.piece.spec) == _cuts(kind.encoded.spec),
        collectives={name: sums for name, sums in collectives.items() if sums},
        seconds=ici_seconds(found, sent) + moved / found.hbm_bytes_per_s,
    )


def _program(compiled: jax.stages.Compiled) -> Program:
    text = compiled.as_text()
    assert text, "compilers of devices have a text"
    return parse(text)


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
    if found.generation.chip_config:
        facts["chip_config_name"] = found.generation.chip_config
    if found.hosts == 1:  # libtpu takes it that each host has 2x2 chips.
        facts["chips_per_host_bounds"] = (*found.axes, 1)[:3]
    return topologies.get_topology_desc(platform="tpu", **facts).devices


# ---- processes ----------------------------------------------------------------------


DEADLINE_S = 3600.0
"""Seconds for one island; a dozen billion parameters take minutes on a free core."""
WORKER = "diloco_jax.planning.compiling"
"""Module that compiles one island."""
AT_A_TIME = 2
"""Processes at a time; each takes a core and some GB of memory."""
Flags = tuple[tuple[str, str], ...]
"""Variables with flags, by name."""
Told = Callable[[str, float], None]
"""Callback (island, share that is done); several threads call it."""


class PlanError(Exception):
    """A compilation was killed."""


def require_libtpu() -> None:
    """Raise ConfigError with the remedy if libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "libtpu is not installed, and `diloco plan` compiles with it: "
            "pip install -e '.[tpu]' (no TPU is needed)"
        )


def compile_islands(config: Config, report: Told) -> dict[str, Any]:
    """Return the plans of the islands by name, as builtins.

    Raises ConfigError, also if a compilation fails, or PlanError if one is killed.
    """
    groups: dict[tuple[IslandConfig, Flags], list[str]] = {}
    for name in config.islands:
        # Without the fields that no compiler sees.
        compiled = dataclasses.replace(
            config.islands[name], stands_for="", region="", step_seconds=0.0, hosts=1
        )
        groups.setdefault((compiled, flags_of(config, name)), []).append(name)
    plans: dict[str, Any] = {}
    running: set[subprocess.Popen[str]] = set()
    with tempfile.TemporaryDirectory(prefix="diloco-plan-") as folder:
        path = Path(folder) / run_files.CONFIG
        write_config_json(config, path)
        with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
            work = {
                pool.submit(_compile, path, alike[0], island, flags, report, running): (
                    alike
                )
                for (island, flags), alike in groups.items()
            }
            try:
                for future in concurrent.futures.as_completed(work):
                    plans.update(dict.fromkeys(work[future], future.result()))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(running):
                    process.kill()
                raise
    return {name: plans[name] for name in config.islands}


def _compile(
    path: Path,
    name: str,
    island: IslandConfig,
    flags: Flags,
    report: Told,
    running: set[subprocess.Popen[str]],
) -> Any:
    """Compile an island in its process and return its plan.

    running: has the process as long as it lives."""
    log, environment = path.with_name(f"{name}.log"), environment_of(island, flags)
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, str(path), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**environment, **importable()},
            text=True,
        )
    running.add(process)
    # A process that hangs prints nothing, so the deadline must kill it.
    killer = threading.Timer(DEADLINE_S, process.kill)
    killer.start()
    assert process.stdout
    try:
        with process.stdout as lines:
            for said in map(json.loads, lines):
                if "config_error" in said:
                    raise ConfigError(said["config_error"])
                if "result" in said:
                    report(name, 1.0)
                    return said["result"]
                report(name, said["done"])
        code = process.wait()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        running.discard(process)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    if code == -signal.SIGKILL:
        raise PlanError(
            f"compiling island {name} was killed, for want of memory or after "
            f"{DEADLINE_S:g} s; it said:\n{last}"
        )
    raise ConfigError(
        f"compiling island {name} for {island.topology} ended with code {code} and no "
        f"result, with {libtpu_flags_in_force(environment)}; flags that you set there "
        f"override those of diloco_jax/before_jax.py; it said:\n{last}"
    )


def flags_of(config: Config, name: str) -> Flags:
    """Return the variables with flags that a launch gives to the island."""
    given = variables_of(config.launch, name).plain
    return tuple((flags, given[flags]) for flags in FLAG_LISTS if flags in given)


def environment_of(island: IslandConfig, flags: Flags = ()) -> dict[str, str]:
    """Return the environment of an island's process, without this machine's devices.

    flags: see `flags_of`; they count before those of this machine.
    """
    environment = dict(os.environ) | dict(flags)
    prepare_environment(1, environment)
    set_libtpu_flags(generation_of(island.topology), environment)
    return environment | {
        "JAX_PLATFORMS": "cpu",
        # No device is opened, so that several processes may load the library.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # The cache cannot read back compilations for absent devices.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
    }


def main(path: str, name: str) -> None:
    """Print the lines that the module's docstring describes."""

    def tell(**line: Any) -> None:
        print(json.dumps(line), flush=True)

    try:
        plan = plan_island(read_config(path), name, lambda done: tell(done=done))
        tell(result=dataclasses.asdict(plan))
    except ConfigError as error:
        tell(config_error=str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
