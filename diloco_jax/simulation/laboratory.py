"""A laboratory for equal islands: all seeds of a config at once, on one device.

Islands and seeds are axes of the arrays, and steps between two boundaries are one
program. Steps, takes, codecs, merges and adoptions are the functions that a run
compiles, mapped over these axes; Theta differs from that of `emulate` by rounding.

The decisions come from a recording of one emulation without arithmetic (`Lockstep`):
when each fragment is taken, merged and adopted, with which weights, and the learning
rate of each step. The protocol decides there as in `emulate`, with bodies that note
what they are told to do. Equal islands do the same at the same step, so a recording is
one list of acts. Merges and islands' losses have no part in any decision, so all seeds
share it, the draws of `EmulationOptions.chance_seed` too.
So the islands must be alike and in lockstep, and nothing fails, joins or is refused;
`emulate` has all of that. A delta that a run might refuse ends the laboratory.

Shapes: `S` seeds, `M` islands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator.holding.store import merges_of
from diloco_jax.coordinator.journal import ALERTS_KEPT
from diloco_jax.core.fragment_merge import MergeMeasures
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.data.loading import load_data
from diloco_jax.files import read_sealed, write_sealed
from diloco_jax.island.device.build import at_anchors
from diloco_jax.island.device.exchange import LentParams
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.build import build_plan
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.island.boundary import TakeOutcome
from diloco_jax.protocol.messages import DeltaKey, Prepared, Version
from diloco_jax.simulation.bodies import Diary, collect, trainer_of
from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.coordinator import NoArrays, Received
from diloco_jax.simulation.emulate import (
    Attendance,
    Emulation,
    Judge,
    add_last,
    check,
    emulation,
    readers,
    world_of,
)
from diloco_jax.simulation.emulation_options import EmulationOptions
from diloco_jax.simulation.island import VirtualFetch
from diloco_jax.simulation.mapped import (
    MappedExchange,
    MappedMerges,
    compiled_steps,
    over_runs,
    placed,
)
from diloco_jax.weights.first import first_pieces, require_repeatable

REMEDY = "the laboratory is for equal islands in lockstep: use emulate"
MOST_STEPS = 32
"""Steps of one program, whose batches are on the device together."""
SHOW_EVERY_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of a laboratory.

    Example:
      >>> from diloco_jax import Config, preset
      >>> from diloco_jax.simulation import laboratory
      >>> config = Config().replace("model", preset("tiny"))
      >>> config = config.replace("islands.a.step_seconds", 1.0)
      >>> config = config.replace("total_tokens", 16_384)
      >>> found = laboratory.run(config, seeds=range(2))
      >>> found.losses.shape, found.runs[1].summary["tokens_merged"]
      ((2,), 16384)
    """

    runs: tuple[Emulation, ...]
    """Results of each seed, as of `emulate`: the summary has tokens and counted bytes,
    the history losses and evaluations. Its merges have no measures and no digest."""
    seconds: float
    """Real seconds of this call."""
    tokens_per_second: float
    """Tokens of all seeds per real second of this call, without the first cycle, which
    compiles; NaN if it had no more."""

    @property
    def losses(self) -> npt.NDArray[np.float64]:
        """Final validation losses by seed, nats per token."""
        return np.array([run.summary["eval_loss"] for run in self.runs])


def run(
    config: Config,
    *,
    seeds: Sequence[int] = (0,),
    options: EmulationOptions | None = None,
    save: Path | None = None,
    save_every_merges: int = 100,
    show: Callable[[str], None] = lambda line: None,
) -> Findings:
    """Run `config` to its end with each of these seeds, in place of `run.seed`.

    Args:
      config: resolved here if it is not; its islands differ in nothing.
      seeds: of parameters and data.
      options: as for `emulate`, without failures, joins and a spread of step times.
      save: a file for the state of the run, from which a later call with the same
        arguments goes on; it stays behind at the end. None: nothing is kept.
      save_every_merges: merges between two writes of that file.
      show: called with a line of progress about once a second.

    Raises:
      ConfigError: naming field, value and remedy.
    """
    options = options or EmulationOptions()
    check(config, options)
    config = resolve(config)
    require_equal(config, options)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds = {list(seeds)}; give at least one, each once")
    if save_every_merges < 1:
        raise ConfigError(f"save_every_merges = {save_every_merges}; it must be >= 1")
    return _Laboratory(config, options, tuple(seeds), show).run(save, save_every_merges)


def require_equal(config: Config, options: EmulationOptions) -> None:
    """Raise ConfigError, naming the field, unless the islands are in lockstep."""
    first, *others = sorted(config.islands)
    own = config.islands[first]
    for name in others:
        for field in dataclasses.fields(IslandConfig):
            here, there = (
                getattr(own, field.name),
                getattr(config.islands[name], field.name),
            )
            if here != there and field.name != "stands_for":
                raise ConfigError(
                    f"islands.{name}.{field.name} = {there!r}, and that of {first} is "
                    f"{here!r}; {REMEDY}"
                )
    wanted: list[tuple[str, Any, Any]] = [
        (f"islands.{first}.{name}", getattr(own, name), usual)
        for name, usual in (
            *(
                ("mesh_data", 1),
                ("mesh_fsdp", 1),
                ("mesh_expert", 1),
                ("mesh_tensor", 1),
                ("hosts", 1),
            ),
            *(("anchor_memory", "device"), ("topology", "")),
        )
    ]
    wanted.append(("placement.faults", tuple(config.placement.faults), ()))
    wanted += [
        (name, getattr(options, name), getattr(EmulationOptions(), name))
        for name in ("step_spread", "failure_every_seconds", "joins", "skip_rows")
    ]
    for name, value, usual in wanted:
        if value != usual:
            raise ConfigError(
                f"{name} = {value!r}, and a laboratory has {usual!r} there alone; "
                f"{REMEDY}"
            )


class _Laboratory:
    """One call of `run`."""

    def __init__(
        self,
        config: Config,
        options: EmulationOptions,
        seeds: tuple[int, ...],
        show: Callable[[str], None],
    ) -> None:
        run, self._names = config.run, sorted(config.islands)
        require_repeatable(config.placement, "a laboratory")
        self._config, self._options = config, options
        self._seeds, self._show = seeds, show
        self._configs = [config.replace("seed", seed) for seed in seeds]
        data = load_data(run)
        self._judge = Judge(config, data)
        model, self._trainer = trainer_of(run, config.islands[self._names[0]])
        self._readers = [
            readers(own, data, self._trainer.fields, options) for own in self._configs
        ]
        self._plan = plan = build_plan(run, model)
        if any(piece.by_use for piece in plan.pieces):
            raise ConfigError(
                f"sync.weights_by_use = {run.sync.weights_by_use!r}, and a laboratory "
                f"counts no use; set it to 'none', or use emulate"
            )
        self._tape = Lockstep(config, options, plan)
        firsts = [first_pieces(own.run, model) for own in self._configs]
        self._merges = MappedMerges(run, plan, self._names, seeds, firsts)
        shape, like = (len(seeds), len(self._names)), self._trainer.abstract_state()
        self._exchange = exchange = MappedExchange(plan, run.sync, like.params)
        exchange.begin([state.anchor for state in self._merges.fragments], shape)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype), like.params
        )
        self._islands = LentParams(exchange, at_anchors(plan, exchange, zeros))
        self._moments = over_runs(self._trainer.inner.init)(self._islands.params)
        self._steps = compiled_steps(self._trainer)
        self._waiting: list[Act] = []
        """Steps that are still to be made."""
        self._metrics: list[Any] = []
        """f32[steps, 3, S, M]: loss, skipped, and the weights of the predictions."""
        self._evaluations: list[tuple[float, int, list[float]]] = []

    # ---- the run --------------------------------------------------------------------

    def run(self, save: Path | None, every: int) -> Findings:
        """Do all acts of the recording, those of an earlier call apart."""
        began, acts, done = time.monotonic(), self._tape.acts, 0
        if save is not None and save.exists():
            done = self._restore(save)
        fragments = len(self._plan.fragments)
        next_show, compiled, first = began, None, len(self._merges.norms)
        for number in range(done, len(acts)):
            act = acts[number]
            if act.kind == "train":
                self._waiting.append(act)
                if len(self._waiting) == MOST_STEPS:
                    self._train()
                continue
            self._train()
            self._do(act)
            if act.kind != "commit":
                continue
            merges, tokens = len(self._merges.norms), act.own[1]
            if compiled is None and merges >= first + fragments:
                jax.block_until_ready(self._islands.params)  # type: ignore[no-untyped-call]
                compiled = time.monotonic(), tokens
            if save is not None and merges % every == 0:
                self._save(save, number + 1)
            if time.monotonic() >= next_show:
                self._show(self._line(merges, tokens, compiled))
                next_show = time.monotonic() + SHOW_EVERY_S
        self._train()
        jax.block_until_ready(self._islands.params)  # type: ignore[no-untyped-call]
        total = self._config.run.total_tokens
        rate = self._rate(total, compiled)
        runs = tuple(self._result(index) for index in range(len(self._seeds)))
        seconds = time.monotonic() - began
        return Findings(runs=runs, seconds=seconds, tokens_per_second=rate)

    def _rate(self, tokens: int, compiled: tuple[float, int] | None) -> float:
        if compiled is None or tokens <= compiled[1]:
            return math.nan
        seconds = time.monotonic() - compiled[0]
        return len(self._seeds) * (tokens - compiled[1]) / seconds

    def _line(
        self, merges: int, tokens: int, compiled: tuple[float, int] | None
    ) -> str:
        of = sum(act.kind == "commit" for act in self._tape.acts)
        total = self._config.run.total_tokens
        line = f"merge {merges:,} of {of:,}, {tokens / total:.0%} of the tokens"
        rate = self._rate(tokens, compiled)
        if rate > 0:
            left = len(self._seeds) * (total - tokens) / rate
            line += f", {rate:,.0f} tokens/s, {left:,.0f} s left"
        if self._evaluations:
            line += f", loss {np.mean(self._evaluations[-1][2]):.4f}"
        return line

    def _do(self, act: Act) -> None:
        fragment, islands, merges = act.fragment, self._islands, self._merges
        match act.kind:
            case "take":
                merges.receive(fragment, islands.take(fragment))
            case "adopt":
                version, keep = act.detail
                arrival = Arrival(
                    fragment=fragment,
                    version=Version()._replace(number=version),
                    publishes=merges.fetch(fragment, version),
                )
                islands.adopt(arrival, keep=keep)
            case "judge":
                islands.judge(fragment, act.detail)
            case "merge":
                merges.compute(act.own)
            case "commit":
                merges.commit(act.detail)
                self._evaluate(*act.own)

    # ---- the islands ----------------------------------------------------------------

    def _train(self) -> None:
        """Make the steps that wait, in one program."""
        steps, self._waiting = self._waiting, []
        if not steps:
            return
        batches = self._batches(steps)
        rates = np.stack([step.own[1] for step in steps]).astype(np.float32)
        state = TrainState(self._islands.params, self._moments)
        with jax.set_mesh(self._trainer.mesh):
            (self._islands.params, self._moments), metrics = self._steps(
                state, batches, rates, self._trainer.frozen
            )
        self._metrics.append(metrics)

    def _batches(self, steps: Sequence[Act]) -> Any:
        """Return the batches of these steps by name, [steps, S, M, B, ...]."""
        shape = (len(steps), len(self._seeds), len(self._names))
        each = [
            own[name].batch(rows)
            for step in steps
            for own in self._readers
            for name, rows in zip(self._names, step.own[0], strict=True)
        ]
        return {
            name: np.stack([batch[name] for batch in each]).reshape(
                *shape, *array.shape
            )
            for name, array in each[0].items()
        }

    def _evaluate(self, now: float, tokens: int) -> None:
        every = self._options.evaluate_every_tokens
        last = self._evaluations[-1][1] // every if every and self._evaluations else 0
        if every and tokens // every > last:
            seeds = range(len(self._seeds))
            losses = [self._judge.loss(self._merges.params(seed)) for seed in seeds]
            self._evaluations.append((now, tokens, losses))

    # ---- results --------------------------------------------------------------------

    def _result(self, seed: int) -> Emulation:
        """Return the result of a seed, by its index."""
        tape, attendance = self._tape, self._tape.attendance
        metrics = np.concatenate([np.asarray(found) for found in self._metrics])
        for island, diaries in enumerate(attendance.diaries.values()):
            for row, found in zip(
                diaries[0].rows, metrics[:, :, seed, island], strict=True
            ):
                row[3:] = found.tolist()
        commits = [act for act in tape.acts if act.kind == "commit"]
        merges = [
            (
                *act.own,
                act.fragment,
                act.detail.version.number,
                act.detail.final,
                [c.tokens for c in act.detail.contributions],
                act.detail.share,
                norms[seed],
                "",
                *[math.nan] * len(MergeMeasures._fields),
            )
            for act, norms in zip(commits, self._merges.norms, strict=True)
        ]
        evaluations = [(now, at, own[seed]) for now, at, own in self._evaluations]
        params = self._merges.params(seed)
        if self._options.evaluate_every_tokens and merges:
            add_last(evaluations, merges[-1], self._judge.loss(params))
        return emulation(
            self._configs[seed],
            tape.world,
            attendance,
            tape.alerts,
            collect(attendance.diaries, merges, evaluations),
            self._judge,
            params,
        )

    # ---- its state on disk ----------------------------------------------------------

    def _save(self, path: Path, done: int) -> None:
        """Write everything that changes. done: number of acts that are done."""
        self._metrics = [np.concatenate([np.asarray(own) for own in self._metrics])]
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._arrays())]
        header = {
            "of": self._digest(),
            "done": done,
            "arrays": [(leaf.dtype.name, leaf.shape) for leaf in leaves],
            "evaluations": self._evaluations,
            "held": [[x is not None for x in row] for row in self._exchange.arrays()],
            "merges": self._merges.facts(),
        }
        write_sealed(path, header, leaves)

    def _restore(self, path: Path) -> int:
        """Go on with what `_save` wrote; return the number of acts that are done."""
        flat = np.empty(0, np.uint8)

        def room(header: dict[str, Any]) -> npt.NDArray[np.uint8]:
            nonlocal flat
            if header.get("of") != self._digest():
                raise ConfigError(
                    f"save = {path} is of another run ({header.get('of')}, this is "
                    f"{self._digest()}): config, options, seeds and version must be "
                    f"the same; name another file, or delete this one"
                )
            sizes = [np.dtype(d).itemsize * math.prod(s) for d, s in header["arrays"]]
            flat = np.empty(sum(sizes), np.uint8)
            return flat

        header, _ = read_sealed(path, room)
        leaves, start = [], 0
        for dtype, shape in header["arrays"]:
            stop = start + np.dtype(dtype).itemsize * math.prod(shape)
            leaves.append(flat[start:stop].view(dtype).reshape(shape))
            start = stop
        like = {
            **self._arrays(),
            "metrics": [0],
            "held": [[0 if x else None for x in row] for row in header["held"]],
            "merges": self._merges.like(header["merges"]),
        }
        found = jax.tree.unflatten(jax.tree.structure(like), leaves)
        self._islands.params = placed(found["params"])
        self._moments, self._metrics = placed(found["moments"]), found["metrics"]
        self._exchange.restore(found["held"])
        self._merges.restore(header["merges"], found["merges"])
        self._evaluations = header["evaluations"]
        done: int = header["done"]
        return done

    def _arrays(self) -> dict[str, Any]:
        """Return all arrays that change."""
        return {
            "params": self._islands.params,
            "moments": self._moments,
            "metrics": self._metrics,
            "held": self._exchange.arrays(),
            "merges": self._merges.arrays(),
        }

    def _digest(self) -> str:
        """Return 16 hex digits over all that the run depends on."""
        of = (
            dataclasses.asdict(self._config),
            dataclasses.asdict(self._options),
            self._seeds,
            metadata.version("diloco-jax"),
        )
        text = json.dumps(of, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- the recording --------------------------------------------------------------

Kind = Literal["train", "take", "adopt", "judge", "merge", "commit"]


class Act(NamedTuple):
    """One thing that all islands do, or the coordinator."""

    kind: Kind
    fragment: int = -1
    detail: Any = None
    """Version and `keep` of an adoption, outcome of a judgement."""
    own: Any = None
    """Of a step: positions, int [M, B], and learning rates, float [M]. Of a merge: the
    order. Of a commit: (virtual seconds, tokens)."""


class TapedBody:
    """A body that notes what an island does, and computes nothing."""

    def __init__(self, tape: Lockstep, diary: Diary, clock: Clock) -> None:
        self._tape, self._diary, self._clock = tape, diary, clock

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> None:
        self._diary.bytes_join += sum(part.nbytes for part in fetched.values())

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        self._diary.bytes_down += fetched.nbytes
        return Arrival(fragment=fragment, version=fetched.version)

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        self._diary.rows.append(
            [self._clock.now, math.nan, learning_rate, math.nan, 0.0, 0.0]
        )
        self._note(Act("train", own=(positions, learning_rate)))

    def take(self, fragment: int) -> int:
        """Return the number of the take."""
        self._diary.takes.append([fragment, self._clock.now, math.nan])
        self._diary.bytes_up += self._tape.bytes_up[fragment]
        self._note(Act("take", fragment))
        return len(self._diary.takes)

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        fragment, number = arrival.fragment, arrival.version.number
        self._diary.adoptions.append((fragment, number, self._clock.now))
        self._note(Act("adopt", fragment, (number, keep)))

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        self._note(Act("judge", fragment, outcome))

    def _note(self, act: Act) -> None:
        self._tape.note(self._diary.island, act)


class Lockstep(NoArrays):
    """A recorded emulation; `acts` are what happens in it, in order.

    Raises ConfigError if the islands do not do the same.
    """

    def __init__(
        self, config: Config, options: EmulationOptions, plan: FragmentPlan
    ) -> None:
        layouts = merges_of(config.run, plan)
        self.bytes_up = tuple(merge.layout_up.total_bytes for merge in layouts)
        super().__init__(
            tuple(merge.layout_down.total_bytes for merge in layouts),
            tuple(4 * size for size in plan.sizes),
        )
        self._names = sorted(config.islands)
        self._noted: dict[str, list[tuple[int, Act]]] = {n: [] for n in self._names}
        self._coordinators: list[tuple[int, Act]] = []
        self._count = 0
        self._computed: dict[int, Merge] = {}
        self.alerts: deque[str] = deque(maxlen=ALERTS_KEPT)
        self.world = world_of(
            config, options, plan.sizes, self, self._make_body, self.alerts.append
        )
        self.attendance = Attendance(config, options, self.world, self.bytes_up)
        self.world.run()
        self.attendance.close()
        self.acts = self._in_order()

    def note(self, island: str, act: Act) -> None:
        """Note what an island does."""
        self._count += 1
        self._noted[island].append((self._count, act))

    # ---- as the coordinator's arrays ------------------------------------------------

    def receive(self, key: DeltaKey, encoded: int) -> Received:
        diary = self.attendance.diaries[key.island][key.incarnation - 1]
        diary.delivered(key.fragment, self.world.clock.now)
        return Received(encoded)

    def compute(self, merge: Merge, deltas: Sequence[int]) -> Prepared:
        names = [c.island for c in merge.contributions]
        if names != self._names or len(set(deltas)) > 1:
            raise ConfigError(
                f"at {self.world.clock.now:g} s fragment {merge.fragment} is merged "
                f"from deltas of {', '.join(names)}, and the islands are "
                f"{', '.join(self._names)} (sync.quorum and sync.grace say who is "
                f"waited for); {REMEDY}"
            )
        self._computed[merge.fragment] = merge
        self._note_own(Act("merge", merge.fragment, own=merge))
        return super().compute(merge, deltas)

    def commit(self, fragment: int, version: Version) -> None:
        merge = self._computed.pop(fragment)
        tokens = self.world.coordinator.state.progress_tokens
        when = (self.world.clock.now, tokens)
        self._note_own(Act("commit", fragment, merge, when))

    def _note_own(self, act: Act) -> None:
        self._count += 1
        self._coordinators.append((self._count, act))

    def _make_body(self, name: str) -> TapedBody:
        return TapedBody(self, self.attendance.diaries[name][-1], self.world.clock)

    # ---- one list -------------------------------------------------------------------

    def _in_order(self) -> list[Act]:
        """Return what all did. What islands do stands where the last of them does it:
        behind whatever it needs, and before whatever needs all of it."""
        first, *others = self._names
        found = list(self._coordinators)
        rows = [self._noted[name] for name in self._names]
        for number in range(max(map(len, rows))):
            here = [row[number][1] if number < len(row) else None for row in rows]
            said = [act and act[:3] for act in here]
            for name, other in zip(others, said[1:], strict=True):
                if other != said[0]:
                    raise ConfigError(
                        f"act {number} of islands.{first} is {said[0]}, that of "
                        f"islands.{name} is {other}; {REMEDY}"
                    )
            acts = [act for act in here if act is not None]
            act = acts[0]
            if act.kind == "train":
                positions, rates = zip(*(each.own for each in acts), strict=True)
                act = act._replace(own=(np.stack(positions), np.array(rates)))
            found.append((max(row[number][0] for row in rows), act))
        return [act for _, act in sorted(found, key=lambda item: item[0])]
