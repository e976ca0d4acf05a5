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
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import Config, ConfigError, IslandConfig, Placement
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator.holding.store import merges_of
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
from diloco_jax.simulation.bodies import Diary, NotedBody, trainer_of
from diloco_jax.simulation.coordinator import NoArrays, Received
from diloco_jax.simulation.emulate import (
    EmulatedWorld,
    Emulation,
    Judge,
    check,
    readers,
)
from diloco_jax.simulation.emulation_options import EmulationOptions, options_of
from diloco_jax.simulation.mapped import (
    MappedExchange,
    MappedMerges,
    compiled_steps,
    over_runs,
    placed,
)
from diloco_jax.weights.first import first_pieces, require_repeatable

REMEDY = "the laboratory is for equal islands in lockstep: use emulate"
ALONE = (
    *("mesh_data", "mesh_fsdp", "mesh_expert", "mesh_tensor", "hosts"),
    *("anchor_memory", "topology"),
)
"""Fields of an island that must be the default, as an island on one device has them."""
SETTLED = ("step_spread", "failure_every_seconds", "joins", "skip_rows")
"""Fields of the options that must be the default."""
MOST_STEPS = 32
"""Steps of one program, whose batches are on the device together."""
SHOW_EVERY_S = 1.0
NOT_MEASURED = (math.nan,) * len(MergeMeasures._fields)
STATE = 2
"""Format of the state on disk."""


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
    options = options_of(options)
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
    for prefix, given, usual, names in (
        (f"islands.{first}.", own, IslandConfig(), ALONE),
        ("placement.", config.placement, Placement(), ("faults",)),
        ("", options, EmulationOptions(), SETTLED),
    ):
        for name in names:
            value, only = getattr(given, name), getattr(usual, name)
            # A sequence may be a list in Python.
            same = tuple(value) == only if isinstance(value, list) else value == only
            if not same:
                raise ConfigError(
                    f"{prefix}{name} = {value!r}, and a laboratory has {only!r} there "
                    f"alone; {REMEDY}"
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
        self._seeds, self._indices, self._show = seeds, range(len(seeds)), show
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
        """f32[steps, 3, S, M]: those of `NOTED`."""
        self._evaluations: list[tuple[float, int, list[float]]] = []
        """Virtual seconds, tokens, and the loss of each seed."""

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
            if act.kind != "merge":
                continue
            merges = len(self._merges.norms)
            tokens = self._tape.world.merges[merges - 1][1]
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
        runs = tuple(map(self._result, self._indices))
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
        of, total = len(self._tape.world.merges), self._config.run.total_tokens
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
                merges.merge(act.detail)
            case "evaluate":
                losses = [self._judge.loss(merges.params(s)) for s in self._indices]
                self._evaluations.append((*act.detail, losses))

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

    # ---- results --------------------------------------------------------------------

    def _result(self, seed: int) -> Emulation:
        """Return the result of a seed, by its index."""
        world = self._tape.world
        metrics = np.concatenate([np.asarray(found) for found in self._metrics])
        for island, diaries in enumerate(world.diaries.values()):
            for row, found in zip(
                diaries[0].rows, metrics[:, :, seed, island], strict=True
            ):
                row[3:] = found.tolist()
        merges = [
            (*row, norms[seed], "", *NOT_MEASURED)
            for row, norms in zip(world.merges, self._merges.norms, strict=True)
        ]
        evaluations = [(now, at, own[seed]) for now, at, own in self._evaluations]
        params = self._merges.params(seed)
        found = world.result(self._judge, params, merges, evaluations)
        return dataclasses.replace(found, config=self._configs[seed])

    # ---- its state on disk ----------------------------------------------------------

    def _save(self, path: Path, done: int) -> None:
        """Write everything that changes. done: number of acts that are done."""
        self._metrics = [np.concatenate([np.asarray(own) for own in self._metrics])]
        leaves, tree = jax.tree.flatten(self._state())
        leaves = [np.asarray(leaf) for leaf in leaves]
        header = {
            "of": self._digest(),
            "done": done,
            "evaluations": self._evaluations,
            "arrays": [(leaf.dtype.name, leaf.shape) for leaf in leaves],
            "state": jax.tree.unflatten(tree, range(len(leaves))),
        }
        write_sealed(path, header, leaves)

    def _restore(self, path: Path) -> int:
        """Go on with what `_save` wrote; return the number of acts that are done."""
        leaves: list[npt.NDArray[Any]] = []

        def room(header: dict[str, Any]) -> npt.NDArray[np.uint8]:
            if header.get("of") != self._digest():
                raise ConfigError(
                    f"save = {path} is of another run ({header.get('of')}, this is "
                    f"{self._digest()}): config, options, seeds and version must be "
                    f"the same; name another file, or delete this one"
                )
            sizes = [np.dtype(d).itemsize * math.prod(s) for d, s in header["arrays"]]
            flat = np.empty(sum(sizes), np.uint8)
            cuts = np.split(flat, np.cumsum(sizes[:-1]))
            for cut, (dtype, shape) in zip(cuts, header["arrays"], strict=True):
                leaves.append(cut.view(dtype).reshape(shape))
            return flat

        header, _ = read_sealed(path, room)
        found = jax.tree.map(leaves.__getitem__, header["state"])
        self._islands.params = placed(found["params"], self._islands.params)
        self._moments = placed(found["moments"], self._moments)
        self._metrics, self._evaluations = found["metrics"], header["evaluations"]
        self._exchange.restore(found["held"])
        self._merges.restore(found["merges"])
        done: int = header["done"]
        return done

    def _state(self) -> dict[str, Any]:
        """Return all arrays that change, in dicts and lists: what is of a kind of
        someone's own, as leaves."""
        return {
            "params": jax.tree.leaves(self._islands.params),
            "moments": jax.tree.leaves(self._moments),
            "metrics": self._metrics,
            "held": self._exchange.arrays(),
            "merges": self._merges.state(),
        }

    def _digest(self) -> str:
        """Return 16 hex digits over all that the run depends on."""
        of = (
            dataclasses.asdict(self._config),
            dataclasses.asdict(self._options),
            self._seeds,
            STATE,
            metadata.version("diloco-jax"),
        )
        text = json.dumps(of, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- the recording --------------------------------------------------------------

Kind = Literal["train", "take", "adopt", "judge", "merge", "evaluate"]


class Act(NamedTuple):
    """One thing that all islands do, or the coordinator."""

    kind: Kind
    fragment: int = -1
    detail: Any = None
    """Version and `keep` of an adoption, outcome of a judgement, order of a merge,
    virtual seconds and tokens of an evaluation."""
    own: Any = None
    """Of a step: positions, int [M, B], and learning rates, float [M]."""


class TapedBody(NotedBody):
    """A body that notes for a tape, too, what its island does."""

    def __init__(self, tape: Lockstep, diary: Diary) -> None:
        super().__init__(tape.world.clock, diary, tape.bytes_up)
        self._note = functools.partial(tape.note, diary.island)

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        super().train(positions, learning_rate)
        self._note(Act("train", own=(positions, learning_rate)))

    def take(self, fragment: int) -> int:
        """Return the number of the take."""
        super().take(fragment)
        self._note(Act("take", fragment))
        return len(self.diary.takes)

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        super().adopt(arrival, keep=keep)
        number = arrival.version.number
        self._note(Act("adopt", arrival.fragment, (number, keep)))

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        self._note(Act("judge", fragment, outcome))


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
        self.acts: list[Act] = []
        self._noted: dict[str, list[Act]] = {n: [] for n in sorted(config.islands)}
        self._computed: dict[int, Merge] = {}
        self.world = EmulatedWorld(
            config, options, plan.sizes, self.bytes_up, self, self._make_body
        )
        self.world.run_to_end()
        if len(set(map(len, self._noted.values()))) > 1:
            self._shared(min(map(len, self._noted.values())))

    def note(self, island: str, act: Act) -> None:
        """Note what an island does. It stands where the last island does it: behind
        whatever it needs, and before whatever needs all of it."""
        noted = self._noted
        noted[island].append(act)
        number = len(noted[island]) - 1
        if all(len(acts) > number for acts in noted.values()):
            self.acts.append(self._shared(number))

    def _shared(self, number: int) -> Act:
        """Return the act of this number of all islands as one."""
        here = {
            name: own[number] if number < len(own) else None
            for name, own in self._noted.items()
        }
        (first, act), *others = here.items()
        said = act and act[:3]
        for name, other in others:
            if (also := other and other[:3]) != said:
                raise ConfigError(
                    f"act {number} of islands.{first} is {said}, that of "
                    f"islands.{name} is {also}; {REMEDY}"
                )
        assert act is not None
        if act.kind == "train":
            own = [each.own for each in here.values() if each is not None]
            positions, rates = zip(*own, strict=True)
            act = act._replace(own=(np.stack(positions), np.array(rates)))
        return act

    def _make_body(self, name: str) -> TapedBody:
        return TapedBody(self, self.world.diaries[name][-1])

    # ---- as the coordinator's arrays ------------------------------------------------

    def receive(self, key: DeltaKey, encoded: int) -> Received:
        self.world.delivered(key)
        return Received(encoded)

    def compute(self, merge: Merge, deltas: Sequence[int]) -> Prepared:
        names, islands = [c.island for c in merge.contributions], list(self._noted)
        if names != islands or len(set(deltas)) > 1:
            raise ConfigError(
                f"at {self.world.clock.now:g} s fragment {merge.fragment} is merged "
                f"from deltas of {', '.join(names)}, and the islands are "
                f"{', '.join(islands)} (sync.quorum and sync.grace say who is "
                f"waited for); {REMEDY}"
            )
        self._computed[merge.fragment] = merge
        return super().compute(merge, deltas)

    def commit(self, fragment: int, version: Version) -> None:
        merge = self._computed.pop(fragment)
        if self.world.flushes(merge):
            self.acts.append(Act("evaluate", detail=self.world.merges[-1][:2]))
        evaluates = self.world.merged(merge)
        self.acts.append(Act("merge", fragment, merge))
        if evaluates:
            self.acts.append(Act("evaluate", detail=self.world.merges[-1][:2]))
