"""A laboratory for equal islands: all seeds of a config at once, on one device.

Islands and seeds are axes of the arrays, and steps between two boundaries are one
program. Steps, takes, codecs, merges and adoptions are the functions that a run
compiles, mapped over these axes; Theta differs from that of `emulate` by rounding.

The decisions come from a recording of one emulation without arithmetic (`lockstep.py`):
when each fragment is taken, merged and adopted, with which weights, and the learning
rate of each step. All seeds share it. So the islands must be alike and in lockstep, and
nothing fails, joins or is refused; `emulate` has all of that.

Shapes: `S` seeds, `M` islands.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator.holding.store import merges_of, params_of, weights_of
from diloco_jax.core import stacked
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import MergeRule, Shape
from diloco_jax.core.fragment_merge import FragmentState, MergeMeasures, is_fit
from diloco_jax.core.fragments import FragmentPlan, get_piece
from diloco_jax.core.merge_rules import MEAN
from diloco_jax.core.merging import rule_for
from diloco_jax.core.tiles import TileGrid, halved_squares
from diloco_jax.data.loading import load_data
from diloco_jax.island.device.build import at_anchors
from diloco_jax.island.device.exchange import Exchange, PieceState
from diloco_jax.island.device.programs import PiecePrograms
from diloco_jax.island.device.replica import LentParams
from diloco_jax.island.device.step import Trainer, TrainState
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.build import build_plan
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.bodies import collect, trainer_of
from diloco_jax.simulation.emulate import (
    Emulation,
    Judge,
    check,
    emulation,
    readers,
)
from diloco_jax.simulation.emulation_options import EmulationOptions
from diloco_jax.simulation.lockstep import REMEDY, Act, Lockstep
from diloco_jax.storage import read_sealed, write_sealed
from diloco_jax.weights.first import first_pieces, require_repeatable

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
            *(("mesh_data", 1), ("mesh_fsdp", 1), ("mesh_tensor", 1), ("hosts", 1)),
            *(("anchor_memory", "device"), ("topology", "")),
        )
    ]
    wanted.append(("placement.faults", tuple(config.placement.faults), ()))
    wanted += [
        (name, getattr(options, name), getattr(EmulationOptions(), name))
        for name in ("step_spread", "failure_every_seconds", "joins")
    ]
    for name, value, usual in wanted:
        if value != usual:
            raise ConfigError(
                f"{name} = {value!r}, and a laboratory has {usual!r} there alone; "
                f"{REMEDY}"
            )


class _Taken(NamedTuple):
    """Deltas of a take, by piece."""

    deltas: list[jax.Array]
    """f32[S, M, n, e]."""
    squares: list[Any]
    """`_halved` of them: nobody waits for them before the merge."""


class _Summed(NamedTuple):
    """A merge that is computed up to the length of its sum."""

    act: int
    """Number of its act."""
    totals: list[jax.Array]
    """f32[S, n, e] by piece."""
    squares: list[Any]
    """`_halved` of them."""
    rules: list[Any]
    """Next states of the merge rule, by piece."""


class _Laboratory:
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
        self._tape = Lockstep(config, options, plan)
        self._merges = merges_of(run, plan)
        shape = (len(seeds), len(self._names))
        begun = [self._begin(first_pieces(own.run, model)) for own in self._configs]
        self._fragments: list[FragmentState] = jax.tree.map(
            lambda *each: jnp.asarray(np.stack(each)), *begun
        )
        exchange = _Exchange(plan, run.sync, self._trainer.abstract_state().params)
        exchange.begin(self._plan, [state.anchor for state in self._fragments], shape)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros((*shape, *leaf.shape), leaf.dtype),
            self._trainer.zeros(),
        )
        self._islands = LentParams(exchange, at_anchors(plan, exchange, zeros))
        self._exchange = exchange
        self._moments = _mapped(self._trainer.inner.init)(self._islands.params)
        self._steps = _steps(self._trainer)
        self._waiting: list[Act] = []
        """Steps that are still to be made."""
        self._taken: dict[int, _Taken] = {}
        """Last take, by fragment."""
        self._summed: dict[int, _Summed] = {}
        self._published: dict[int, dict[int, tuple[jax.Array, ...]]] = {
            fragment: {} for fragment in range(len(plan.fragments))
        }
        """Publishes that are not adopted, by fragment and version."""
        self._metrics: list[Any] = []
        """f32[steps, 3, S, M]: loss, skipped, and the weights of the predictions."""
        self._norms: list[list[float]] = []
        """Lengths of merged deltas by merge and seed."""
        self._evaluations: list[tuple[float, int, list[float]]] = []

    def _begin(self, first: Any) -> list[FragmentState]:
        return [
            merge.begin([get_piece(first, piece) for piece in merge.pieces])
            for merge in self._merges
        ]

    # ---- the run --------------------------------------------------------------------

    def run(self, save: Path | None, every: int) -> Findings:
        """Do all acts of the recording, those of an earlier call apart."""
        began, acts, done = time.monotonic(), self._tape.acts, 0
        if save is not None and save.exists():
            done = self._restore(save)
        fragments = len(self._plan.fragments)
        next_show, compiled, first = began, None, len(self._norms)
        for number in range(done, len(acts)):
            act = acts[number]
            if act.kind == "train":
                self._waiting.append(act)
                if len(self._waiting) < MOST_STEPS:
                    continue
            self._train()
            if act.kind == "train":
                continue
            self._do(number, act)
            merges = len(self._norms)
            if act.kind != "commit":
                continue
            now, tokens = time.monotonic(), act.own[1]
            if compiled is None and merges >= first + fragments:
                jax.block_until_ready(self._islands.params)  # type: ignore[no-untyped-call]
                compiled = time.monotonic(), tokens
            if save is not None and merges % every == 0:
                self._save(save, number + 1)
            if now >= next_show:
                self._show(self._line(merges, tokens, compiled))
                next_show = now + SHOW_EVERY_S
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

    def _do(self, number: int, act: Act) -> None:
        fragment = act.fragment
        match act.kind:
            case "take":
                self._take(fragment)
            case "adopt":
                version, keep = act.detail
                self._adopt(fragment, version, keep=keep)
            case "judge":
                self._islands.judge(fragment, act.detail)
            case "merge":
                self._merge(number, act.own)
            case "commit":
                self._commit(act.detail)
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

    def _take(self, fragment: int) -> None:
        merge, encoded = self._merges[fragment], self._islands.take(fragment)
        deltas = [
            _decoded(merge.up, piece.shape, octets)
            for piece, octets in zip(merge.pieces, encoded, strict=True)
        ]
        self._taken[fragment] = _Taken(deltas, list(map(_halved, deltas)))

    def _adopt(self, fragment: int, version: int, *, keep: bool) -> None:
        waiting = self._published[fragment]
        chain = tuple(waiting.pop(v) for v in sorted(waiting) if v <= version)
        number = Version()._replace(number=version)
        arrival = Arrival(fragment=fragment, version=number, publishes=chain)
        self._islands.adopt(arrival, keep=keep)

    # ---- the coordinator ------------------------------------------------------------

    def _merge(self, number: int, order: Merge) -> None:
        """Sum the deltas, as the rule has it."""
        fragment, merge = order.fragment, self._merges[order.fragment]
        taken, kept = self._taken[fragment], self._fragments[fragment].rules
        shares, squares = self._shares(order), self._squares(number, taken)
        totals, rules = [], []
        for index, piece in enumerate(merge.pieces):
            rule = rule_for(piece, merge.rule, final=order.final)
            numbers = [
                rule.factors(shares, own[index]) if rule.needs == "sum" else shares
                for own in squares
            ]
            total, after = self._total(order, index, rule, numbers, kept[index])
            totals.append(total)
            rules.append(kept[index] if order.final else after)
        halved = list(map(_halved, totals))
        self._summed[fragment] = _Summed(number, totals, halved, rules)

    def _total(
        self, order: Merge, index: int, rule: Any, numbers: Any, state: Any
    ) -> tuple[jax.Array, Any]:
        """Return `stacked.total` of a piece, by seed."""
        deltas = self._taken[order.fragment].deltas[index]
        shape = self._merges[order.fragment].pieces[index].shape
        given = np.array(numbers, np.float32), np.float32(order.share)
        found: tuple[jax.Array, Any] = _total(rule, shape, deltas, *given, state)
        return found

    def _shares(self, order: Merge) -> list[float]:
        sync = self._config.run.sync
        weights = weights_of(sync, order.contributions, final=order.final)
        return [weight / math.fsum(weights) for weight in weights]

    def _squares(self, number: int, taken: _Taken) -> list[list[list[float]]]:
        """Return |d|^2 by seed, piece and island. number: of the act."""
        shape = (len(self._seeds), len(self._names))
        found = [_sums(halved, shape).tolist() for halved in taken.squares]
        by_seed = [[own[index] for own in found] for index in range(len(self._seeds))]
        for seed, own in zip(self._seeds, by_seed, strict=True):
            for name, lengths in zip(self._names, zip(*own, strict=True), strict=True):
                if not is_fit(lengths):
                    raise ConfigError(
                        f"seed {seed}: a delta of islands.{name} has the squares "
                        f"{list(lengths)} by piece at act {number}, and a run would "
                        f"refuse it; lower inner.learning_rate, or use emulate"
                    )
        return by_seed

    def _commit(self, order: Merge) -> None:
        """Scale the sum, take the outer step and publish."""
        fragment, merge = order.fragment, self._merges[order.fragment]
        summed, shares = self._summed.pop(fragment), self._shares(order)
        squares = self._squares(summed.act, self._taken[fragment])
        factors = np.ones((len(merge.pieces), len(self._seeds)), np.float32)
        lengths = np.zeros(factors.shape)
        for index, piece in enumerate(merge.pieces):
            rule = rule_for(piece, merge.rule, final=order.final)
            found = _sums(summed.squares[index], (len(self._seeds),)).tolist()
            for seed, square in enumerate(found):
                factor: float | None = 1.0
                if rule.needs == "sum":
                    factor = rule.scale(shares, squares[seed][index], square)
                    if factor is None:
                        factor, rows = 1.0, [shares] * len(self._seeds)
                        mean, _ = self._total(order, index, MEAN, rows, ())
                        total = summed.totals[index].at[seed].set(mean[seed])
                        summed.totals[index] = total
                        square = float(_sums(_halved(mean[seed]), ()))
                    factor *= order.share
                factors[index, seed] = factor
                lengths[index, seed] = abs(factor) * math.sqrt(square)
        norms = [math.hypot(*own) for own in lengths.T]
        before = self._fragments[fragment]
        theta, anchor, outer, encoded = _finished(
            (merge.settings, merge.down, tuple(p.shape for p in merge.pieces)),
            order.final,
            (before.theta, before.anchor, before.outer, tuple(summed.totals)),
            tuple(factors),
            np.array(norms, np.float32),
        )
        self._fragments[fragment] = FragmentState(
            theta, anchor, outer, tuple(summed.rules)
        )
        self._published[fragment][order.version.number] = encoded
        self._norms.append(norms)

    def _evaluate(self, now: float, tokens: int) -> None:
        every = self._options.evaluate_every_tokens
        last = self._evaluations[-1][1] // every if every and self._evaluations else 0
        if every and tokens // every > last:
            seeds = range(len(self._seeds))
            losses = [self._judge.loss(self._params(seed)) for seed in seeds]
            self._evaluations.append((now, tokens, losses))

    def _params(self, seed: int) -> Any:
        """Return Theta of this seed, by its index."""
        thetas = [
            tuple(np.asarray(piece[seed]) for piece in state.theta)
            for state in self._fragments
        ]
        return params_of(self._plan, thetas)

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
            for act, norms in zip(commits, self._norms, strict=True)
        ]
        evaluations = [(now, at, own[seed]) for now, at, own in self._evaluations]
        return emulation(
            self._configs[seed],
            tape.world,
            attendance,
            tape.alerts,
            collect(attendance.diaries, merges, evaluations),
            self._judge,
            self._params(seed),
        )

    # ---- its state on disk ----------------------------------------------------------

    def _save(self, path: Path, done: int) -> None:
        """Write everything that changes. done: number of acts that are done."""
        self._metrics = [np.concatenate([np.asarray(own) for own in self._metrics])]
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self._state())]
        header = {
            "of": self._digest(),
            "done": done,
            "arrays": [(leaf.dtype.name, leaf.shape) for leaf in leaves],
            "norms": self._norms,
            "evaluations": self._evaluations,
            "taken": list(self._taken),
            "summed": [(f, summed.act) for f, summed in self._summed.items()],
            "published": [(f, list(own)) for f, own in self._published.items()],
            "held": jax.tree.map(
                lambda x: x is not None, self._held(), is_leaf=lambda x: x is None
            ),
        }
        write_sealed(path, header, leaves)

    def _restore(self, path: Path) -> int:
        """Read what `_save` wrote; return the number of acts that are done."""

        def octets(header: dict[str, Any]) -> npt.NDArray[np.uint8]:
            if header.get("of") != self._digest():
                raise ConfigError(
                    f"save = {path} is of another run ({header.get('of')}, this is "
                    f"{self._digest()}): config, options, seeds and version must be "
                    f"the same; name another file, or delete this one"
                )
            sizes = [np.dtype(d).itemsize * math.prod(s) for d, s in header["arrays"]]
            return np.empty(sum(sizes), np.uint8)

        flat: list[npt.NDArray[np.uint8]] = []
        header, _ = read_sealed(path, lambda head: flat.append(octets(head)) or flat[0])
        leaves, start = [], 0
        for dtype, shape in header["arrays"]:
            stop = start + np.dtype(dtype).itemsize * math.prod(shape)
            leaves.append(flat[0][start:stop].view(dtype).reshape(shape))
            start = stop
        # The structure of `_state` at that act, with other leaves.
        own = {f: [0] * len(merge.pieces) for f, merge in enumerate(self._merges)}
        self._taken = {f: _Taken(own[f], own[f]) for f in header["taken"]}
        self._summed = {
            f: _Summed(act, own[f], own[f], list(self._fragments[f].rules))
            for f, act in header["summed"]
        }
        self._published = {
            f: {v: tuple(own[f]) for v in versions}
            for f, versions in header["published"]
        }
        self._metrics = [0]
        present = [[0 if x else None for x in row] for row in header["held"]]
        structure = jax.tree.structure({**self._state(), "held": present})
        self._take_over(jax.tree.unflatten(structure, leaves))
        self._norms, self._evaluations = header["norms"], header["evaluations"]
        done: int = header["done"]
        return done

    def _state(self) -> dict[str, Any]:
        """Return all arrays that change."""
        return {
            "params": self._islands.params,
            "moments": self._moments,
            "held": self._held(),
            "fragments": self._fragments,
            "taken": {f: tuple(own) for f, own in self._taken.items()},
            "summed": {f: tuple(own)[1:] for f, own in self._summed.items()},
            "published": self._published,
            "metrics": self._metrics,
        }

    def _take_over(self, state: dict[str, Any]) -> None:
        """Set the arrays that `_state` returned; lengths stay in f64 on the host."""

        def placed(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)

        self._islands.params = placed(state["params"])
        self._moments = placed(state["moments"])
        self._fragments = placed(state["fragments"])
        self._published = placed(state["published"])
        self._metrics = state["metrics"]
        self._taken = {
            f: _Taken(placed(deltas), squares)
            for f, (deltas, squares) in state["taken"].items()
        }
        self._summed = {
            f: _Summed(self._summed[f].act, placed(totals), squares, placed(rules))
            for f, (totals, squares, rules) in state["summed"].items()
        }
        for piece, held in zip(self._exchange.all(), state["held"], strict=True):
            for name, array in zip(HELD, held, strict=True):
                setattr(piece, name, None if array is None else placed(array))

    def _held(self) -> list[list[Any]]:
        return [
            [getattr(piece, name) for name in HELD] for piece in self._exchange.all()
        ]

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


# ---- programs that are mapped over seeds and islands --------------------------------

HELD = ("anchor", "base", "residual", "before")
"""What an exchange holds of each piece."""


def _mapped(function: Any, islands: Any = 0, seeds: Any = 0) -> Any:
    """Map a function over [S, M]. islands, seeds: `in_axes` of each."""
    return jax.vmap(jax.vmap(function, in_axes=islands), in_axes=seeds)


class _Exchange(Exchange):
    """Takes and adoptions of all islands and seeds."""

    def begin(self, plan: FragmentPlan, anchors: Any, shape: tuple[int, ...]) -> None:
        """Begin at these anchors, by fragment and piece, f32[S, n, e]. shape: (S,
        M)."""
        for number, pieces in enumerate(plan.fragments):
            values = [
                jax.vmap(TileGrid.of(piece.shape).from_tiles)(array)
                for piece, array in zip(pieces, anchors[number], strict=True)
            ]
            for state in self.held(number):
                own = [values[n] for n in state.numbers]
                value = own[0] if state.programs.rows == 1 else jnp.stack(own, 1)
                every = (*shape, *value.shape[1:])
                state.anchor = jnp.array(jnp.broadcast_to(value[:, None], every))
                if state.residual is not None:
                    state.residual = jnp.zeros(every, value.dtype)
                programs: Any = _programs(state.programs)
                state.programs = programs

    def all(self) -> list[PieceState]:
        """Return what is held, fragment by fragment."""
        return [
            state
            for number in range(len(self._plan.fragments))
            for state in self.held(number)
        ]


class _Programs:
    """`PiecePrograms` of all islands and seeds; a publish is that of a seed."""

    def __init__(self, own: PiecePrograms) -> None:
        self.rows = own.rows
        kept = (0,) if own.rows == 1 else ()

        def mapped(name: str, *islands: Any, seeds: Any = None, donates: bool) -> Any:
            function = _mapped(getattr(own, name), islands, seeds or islands)
            return jax.jit(function, donate_argnums=kept if donates else ())

        self.take = mapped("take", 0, None, 0, 0, donates=False)
        self.arrive = mapped(
            "arrive",
            *(0, None, 0, 0, None, None),
            seeds=(0, None, 0, 0, 0, None),
            donates=True,
        )
        self.advance = mapped("advance", 0, None, seeds=(0, 0), donates=False)
        self.move = mapped("move", 0, 0, 0, donates=False)
        self.put = mapped("put", 0, None, 0, donates=True)

    def gathered(self, landed: Any) -> Any:
        """Return a publish, which is where it is needed."""
        return landed


_programs = functools.lru_cache(maxsize=256)(_Programs)


@functools.lru_cache(maxsize=32)
def _steps(trainer: Trainer) -> Any:
    """Compile steps of all islands and seeds, one after the other."""

    def steps(state: Any, batches: Any, rates: Any, frozen: Any) -> Any:
        update = _mapped(trainer.update, (0, 0, 0, None), (0, 0, None, None))

        def step(state: Any, given: Any) -> Any:
            state, metrics = update(state, *given, frozen)
            return state, jnp.stack([metrics[name] for name in NOTED])

        return jax.lax.scan(step, state, (batches, rates))

    return jax.jit(steps, donate_argnums=0)


NOTED = ("loss", "skipped", "tokens")
"""Metrics of a step that are kept."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decoded(codec: Codec, shape: Shape, encoded: jax.Array) -> jax.Array:
    found: jax.Array = _mapped(functools.partial(stacked.decoded, codec, shape))(
        encoded
    )
    return found


@functools.partial(jax.jit, static_argnums=(0, 1))
def _total(
    rule: MergeRule, shape: Shape, deltas: Any, numbers: Any, share: Any, state: Any
) -> Any:
    total = functools.partial(stacked.total, rule, shape)
    return jax.vmap(total, in_axes=(0, 0, None, 0))(deltas, numbers, share, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _finished(kind: Any, final: bool, arrays: Any, factors: Any, norms: Any) -> Any:
    """Return Theta, anchor, state of the outer optimizer and publish."""
    settings, codec, shapes = kind

    def finish(arrays: Any, factors: Any, norm: Any) -> Any:
        theta, anchor, state, totals = arrays
        merged = tuple(x * f for x, f in zip(totals, factors, strict=True))
        theta, state = stacked.stepped(
            settings, shapes, theta, state, merged, norm, final=final
        )
        encoded, anchor = stacked.published(codec, shapes, theta, anchor)
        return theta, anchor, state, encoded

    return jax.vmap(finish)(arrays, factors, norms)


def _halved(arrays: jax.Array) -> jax.Array:
    """Return the squares of [..., n, e], added up as far as a device does it, in
    f64."""
    *shape, tiles, elements = arrays.shape
    with jax.enable_x64(True):
        found = halved_squares(arrays.reshape(-1, elements))
        return found.reshape(*shape, tiles, -1)


def _sums(halved: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return the sums of squares, f64[shape], of `_halved`."""
    tiles = np.asarray(halved).sum(axis=-1).reshape(math.prod(shape), -1)
    return np.array([math.fsum(row) for row in tiles]).reshape(shape)
