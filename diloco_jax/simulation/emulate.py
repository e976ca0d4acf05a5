"""`diloco emulate`: all islands of a config with real gradients, in virtual time.

The runtime's own parts decide, take steps, take deltas and merge.
These are missing: wire, threads, disks (an island that returns begins with fresh
moments), and islands' own validation (`placement.evaluate_every_steps`). Equal inputs
give equal bits. A pause among the faults makes one step longer; the island's reports go
on meanwhile. A coordinator that is killed or paused is away, and each time comes back
from its records, with Theta as it was. `EmulatedWorld` starts islands, lets them fail
and leave. An emulation may go on from a `ForkPoint`, as the recorded run would after a
stop there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Console

from diloco_jax import compilation, run_files
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.config import require_section
from diloco_jax.config.fields import as_html
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import ALERTS_KEPT
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.core.fragments import Params
from diloco_jax.data.loading import Data, GlobalIndex, load_data
from diloco_jax.data.reader import BatchReader, ValidationBatches
from diloco_jax.data.source import Fields, Rows
from diloco_jax.evaluation import BATCH_SIZE, as_json, of_data
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.files import write_json
from diloco_jax.island.device.exchange import Restored
from diloco_jax.island.loop import Evaluator
from diloco_jax.models.build import build_plan, inner_note
from diloco_jax.observability.history import History
from diloco_jax.observability.terminal import Dashboard, closing_report
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import DeltaKey, Version, lookahead_of
from diloco_jax.protocol.records import Durable
from diloco_jax.simulation.bodies import (
    Diary,
    EncodedDelta,
    StoreMerging,
    TrainedBody,
    collect,
    deaths,
    trainer_of,
)
from diloco_jax.simulation.clock import durations
from diloco_jax.simulation.coordinator import Merging, Received, World
from diloco_jax.simulation.emulation_options import EmulationOptions, options_of
from diloco_jax.simulation.island import Body, IslandSpec
from diloco_jax.weights.first import first_pieces, require_repeatable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


RUN_ID = "emulated"
LIVES_IN_VAIN = 1000
"""Failures of machines in a row, of all islands together, without progress between
them. After this number the run would go on for ever.
"""


class EmulatedWorld(World):
    """All islands of a config in virtual time: they come and go, and their coordinator
    fails, as config and options say; and what is noted of them meanwhile.

    An island that fails, by a kill of `placement.faults` or at random, is back
    `down_seconds` later, as often as it fails.

    sizes, bytes_up: parameters, and bytes of an encoded delta, by fragment.
    merging, make_body, before: as for `World`.
    """

    def __init__(
        self,
        config: Config,
        options: EmulationOptions,
        sizes: tuple[int, ...],
        bytes_up: tuple[int, ...],
        merging: Merging,
        make_body: Callable[[str], Body],
        before: tuple[Sequence[Durable], float] = ((), 0.0),
    ) -> None:
        self.alerts: deque[str] = deque(maxlen=ALERTS_KEPT)
        self.diaries: dict[str, list[Diary]] = {n: [] for n in sorted(config.islands)}
        """Diaries of all incarnations, by island."""
        self.merges: list[tuple[Any, ...]] = []
        """Rows of the history."""
        self._settings, self._options, self._bytes_up = config, options, bytes_up
        self._evaluate_at_tokens = options.evaluate_every_tokens
        self._evaluated = False
        """Whether the last merge's parameters were evaluated."""
        self._in_vain = self._progress_tokens = 0
        placement = config.placement
        self._faults = parse_faults(placement.faults, config.islands).faults
        chance = np.random.default_rng(options.chance_seed)
        seconds = durations(options.merge_seconds, options.merge_spread, chance)
        super().__init__(
            config.run,
            policy_config(config.run, placement, RUN_ID, sizes),
            merging,
            report_s=placement.deadlines.report_s,
            line_speed=options.line,
            make_body=make_body,
            alert=self.alerts.append,
            merge_seconds=lambda merge: next(seconds),
            outages={
                f.step: options.down_seconds if f.pause_s is None else f.pause_s
                for f in self._faults
                if f.who == COORDINATOR
            },
            before=before,
        )
        state, policy = self.coordinator.state, self.coordinator.config
        self._before = {
            name: ledger.island_totals(policy, state, name) for name in state.islands
        }
        """Tokens of each island before the emulation began."""
        self._leave_at = dict.fromkeys(self.diaries, math.inf)
        for name in self.diaries:
            start, stop = options.joins.get(name, (0.0, math.inf))
            self._leave_at[name] = self.began_s + stop
            self.clock.at(self.began_s + start, functools.partial(self._enter, name))
            if stop < math.inf:
                leave = functools.partial(self._leave, name)
                self.clock.at(self._leave_at[name], leave)

    def run_to_end(self) -> None:
        """Run until every token is merged or lost. Raises ConfigError if no island is
        left before."""
        self.run()
        if not self.coordinator.finished:
            raise ConfigError(
                f"joins: at {self.clock.now:g} s no island is left, and the run has "
                f"{self.coordinator.state.progress_tokens} of its "
                f"{self._settings.run.total_tokens} tokens; let an island stay to the "
                f"end, or lower total_tokens"
            )
        for name in self.diaries:
            self._close(name, "finished")

    def delivered(self, key: DeltaKey) -> None:
        """Note that a delta has arrived."""
        first, *_ = diaries = self.diaries[key.island]
        diary = diaries[key.incarnation - first.incarnation]
        diary.delivered(key.fragment, self.clock.now)

    def merged(self, merge: Merge, *found: Any) -> bool:
        """Note a merge that is current now; tell if its parameters are to be evaluated.
        found: length, digest and measures, the end of its row of the history."""
        tokens = self.coordinator.state.progress_tokens
        every = self._options.evaluate_every_tokens
        parts: Counter[str] = Counter()
        for c in merge.contributions:
            parts[c.island] += c.tokens
        self.merges.append(
            (
                self.clock.now,
                tokens,
                merge.fragment,
                merge.version.number,
                merge.final,
                [parts[name] for name in self.diaries],
                merge.share,
                *found,
            )
        )
        # What the flush leaves is evaluated at the end.
        due = not merge.final and every > 0 and self._evaluate_at_tokens <= tokens
        if due:
            self._evaluate_at_tokens = tokens - tokens % every + every
        self._evaluated = due
        return due

    def flushes(self, merge: Merge) -> bool:
        """Tell if this merge begins the flush, and the parameters before it are still
        to be evaluated."""
        every, merges = self._options.evaluate_every_tokens, self.merges
        if not (merge.final and every and merges) or self._evaluated:
            return False
        _, _, _, _, flushed, *_ = merges[-1]
        return not flushed

    def status(self) -> dict[str, Any]:
        """Return the status of the run, as in `diloco status`."""
        return summary.status(
            self.coordinator.config,
            self.coordinator.state,
            self._roster(),
            seconds=self.clock.now,
            alerts=list(self.alerts),
            now=self.clock.now,
        )

    def result(
        self,
        judge: Judge,
        params: Params,
        merges: Sequence[tuple[Any, ...]],
        evaluations: Sequence[tuple[float, int, float]],
        **more: Any,
    ) -> Emulation:
        """Return the result of a run that is over, with these parameters and rows of
        the history. more: fields of the summary."""
        coordinator, roster = self.coordinator, self._roster()
        if self._options.evaluate_every_tokens and merges:
            # The last merges, of the flush, come after the last tokens.
            last = (*merges[-1][:2], judge.loss(params))
            if evaluations[-1:] != [last]:
                evaluations = [*evaluations, last]
        found = summary.summary(
            coordinator.config,
            coordinator.state,
            roster,
            wall_seconds=self.clock.now - self.began_s,
            alerts=[*self.alerts, *summary.missing(self._settings, roster)],
            now=self.clock.now,
        )
        return Emulation(
            config=self._settings,
            history=collect(self.diaries, merges, evaluations),
            summary={
                **found,
                **summary.rows_by_source(self._settings.run.data, coordinator.state),
                **judge.evaluation(params),
                **more,
            },
            params=params,
        )

    def _roster(self) -> Roster:
        """Return the roster that a coordinator would hold by now."""
        self._update()
        roster = Roster()
        roster.before = self._before
        for name, diaries in self.diaries.items():
            for diary in diaries:
                now = self.clock.now if diary.ended is None else diary.ended
                roster.hello(diary, diary.began)
                roster.report(name, diary.measures(), (), now)
                roster.members[name].adopted = {f: v for f, v, _ in diary.adoptions}
                if diary.end == "left":
                    roster.left(name, now)
            roster.failures.add(deaths(diaries))
        return roster

    # ---- what happens ---------------------------------------------------------------

    def _enter(self, name: str) -> None:
        if self.coordinator.finished or self.clock.now >= self._leave_at[name]:
            return
        options, island = self._options, self._settings.islands[name]
        incarnation = self.next_incarnation(name)
        self.diaries[name].append(
            Diary(
                island=name,
                incarnation=incarnation,
                tokens_per_step=island.batch_size * self._settings.run.sequence_length,
                began=self.clock.now,
                compile_seconds=options.join_seconds,
            )
        )
        chance = np.random.default_rng(
            (options.chance_seed, list(self.diaries).index(name), incarnation)
        )
        if options.failure_every_seconds:
            lasts_s = chance.exponential(options.failure_every_seconds)
            fail = functools.partial(self._fail, name, incarnation)
            self.clock.after(lasts_s, fail)
        seconds = durations(island.step_seconds, options.step_spread, chance)
        self.start(
            IslandSpec(
                name=name,
                batch_size=island.batch_size,
                step_seconds=functools.partial(self._step_seconds, name, seconds),
                join_seconds=options.join_seconds,
                bytes_up=self._bytes_up,
                lookahead=lookahead_of(island.hosts),
            )
        )

    def _step_seconds(self, name: str, usual: Iterator[float], step: int) -> float:
        """Return the seconds of a step that begins now; schedule a kill after it."""
        diary = self.diaries[name][-1]
        whose = (name, diary.incarnation)  # Or one of its hosts'.
        faults = [f for f in self._faults if (f.who, f.incarnation) == whose]
        pauses = [f.pause_s for f in faults if f.step == step and f.pause_s is not None]
        seconds = next(usual) + sum(pauses)
        if any(f.step == step + 1 and f.kills for f in faults):
            fail = functools.partial(self._fail, name, diary.incarnation)
            self.clock.after(seconds, fail)
        diary.rows[-1][1] = seconds
        return seconds

    def _fail(self, name: str, incarnation: int) -> None:
        """Kill this incarnation if it still runs; the next one comes later."""
        island = self.islands[name]
        if island.incarnation != incarnation or island.ended is not None:
            return
        self.kill(name)
        self._close(name, "died")
        again = functools.partial(self._enter, name)
        self.clock.after(self._options.down_seconds, again)
        self._require_progress()

    def _require_progress(self) -> None:
        tokens = self.coordinator.state.progress_tokens
        self._in_vain = self._in_vain + 1 if tokens == self._progress_tokens else 0
        self._progress_tokens = tokens
        if self._in_vain >= LIVES_IN_VAIN:
            raise ConfigError(
                f"failure_every_seconds = {self._options.failure_every_seconds:g}: the "
                f"last {LIVES_IN_VAIN} lives of islands brought no progress, and at "
                f"{self.clock.now:g} s the run has {tokens} of its "
                f"{self._settings.run.total_tokens} tokens; raise it well above the "
                f"seconds of a join and of sync.steps_per_cycle steps"
            )

    def _leave(self, name: str) -> None:
        island = self.islands[name]
        if island.ended is None:
            island.leave("stopped")
            self._close(name, "left")

    def _update(self) -> None:
        """Bring the diaries of live incarnations up to date."""
        for name, diaries in self.diaries.items():
            for diary in diaries[-1:]:
                if diary.ended is None:
                    diary.steps = self.islands[name].steps

    def _close(self, name: str, why: str) -> None:
        self._update()
        for diary in self.diaries[name][-1:]:
            if diary.ended is None:
                diary.ended, diary.end = self.clock.now, why


Show = Callable[[dict[str, Any]], None]
"""Callback for the status of the run, about once a second, as in `diloco status`."""

SHOW_EVERY_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Emulation:
    """Result of an emulation.

    Example:
      >>> from diloco_jax import Config, emulate, preset
      >>> config = Config().replace("model", preset("tiny"))
      >>> config = config.replace("islands.a.step_seconds", 1.0)
      >>> config = config.replace("total_tokens", 16_384)
      >>> found = emulate(config)
      >>> found.summary["tokens_merged"], found.params["embedding"].dtype.name
      (16384, 'float32')
      >>> found.plot_loss().get_ylabel()
      'loss, nats per token'
    """

    config: Config
    """The config, resolved."""
    history: History
    summary: dict[str, Any]
    """Contents of a run's `summary.json`. Seconds are virtual, bytes those of the
    payloads.
    """
    params: Params
    """Flushed global parameters Theta (numpy, f32)."""

    def plot_loss(self, *, title: str | None = None, axes: Axes | None = None) -> Axes:
        """Draw the loss of every island over time, and the final validation loss; as
        `History.plot_loss`."""
        final = self.summary["eval_loss"]
        return self.history.plot_loss(final=final, title=title, axes=axes)

    def __repr__(self) -> str:
        count, found = len(self.config.islands), self.summary
        return (
            f"<Emulation of {count} islands: eval_loss = {found['eval_loss']}, "
            f"{found['tokens_merged']:,} tokens merged in {found['merges']:,} merges>"
        )

    def _repr_html_(self) -> str:
        found, shown = self.summary, {}
        for name in ("eval_loss", "tokens_merged", "tokens_lost", "merges", "goodput"):
            number = sum(found[name].values()) if name == "tokens_lost" else found[name]
            shown[name] = f"{number:,}" if isinstance(number, int) else f"{number:.5g}"
        return as_html({**shown, "virtual seconds": f"{found['wall_seconds']:,.1f}"})

    def write(self, workdir: Path) -> None:
        """Write `history/*.csv` and `summary.json`."""
        self.history.write(workdir / run_files.HISTORY)
        write_json(self.summary, workdir / run_files.SUMMARY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkPoint:
    """State of a recorded run after one of its merges, as after a stop of all of its
    processes: what was under way is lost, and islands come back with their moments."""

    log: tuple[Durable, ...]
    fragments: Sequence[tuple[Version, Mapping[str, list[Any]]]]
    """Version and arrays of each, as `Store.current` returns them."""
    islands: Mapping[str, Restored]
    """What islands come back with, by name; others begin with fresh moments."""
    seconds: float
    """Seconds of the run by then, from which virtual time goes on."""
    about: Mapping[str, Any]
    """Field `forked` of the summary."""


def emulate(
    config: Config,
    *,
    options: EmulationOptions | None = None,
    show: Show | None = None,
    since: ForkPoint | None = None,
) -> Emulation:
    """Run `config` to its end in this process.

    Args:
      config: resolved here if it is not. Every island needs `step_seconds` > 0.
      options: the network, chance, and islands' comings and goings; by default none.
      show: called with the status about once a second of real time.
      since: what a recorded run was at one of its merges, from which this one goes on
        (`diloco fork`); None = a new run.

    Example:
      >>> from diloco_jax import Config, emulate, preset
      >>> config = Config().replace("model", preset("tiny"))
      >>> config = config.replace("islands.a.step_seconds", 1.0)
      >>> config = config.replace("total_tokens", 16_384)
      >>> emulate(config).summary["eval_loss"] < 5.55  # nats; of a uniform guess
      True

    Raises:
      ConfigError: naming field, values and remedy.
    """
    options = options_of(options)
    check(config, options)
    show = show or (lambda status: None)
    return _Emulator(resolve(config), options, show, since).run()


def check(config: Config, options: EmulationOptions) -> None:
    """Raise ConfigError if this cannot be emulated."""
    require_section("config", config, Config)
    config.validate()
    options.validate(config.islands)
    deadlines = config.placement.deadlines
    for name, island in config.islands.items():
        if not island.step_seconds > 0:
            raise ConfigError(
                f"islands.{name}.step_seconds = {island.step_seconds:g}; virtual time "
                f"goes by it: give the seconds of a step, as in "
                f"--islands.{name}.step-seconds 0.5"
            )
    faults = parse_faults(config.placement.faults, config.islands).faults
    for fault in faults:
        waits = fault.kills or (fault.pause_s is not None and fault.pause_s < math.inf)
        away = waits and not fault.prepared and fault.incarnation == 1
        if fault.who == COORDINATOR and not away:
            raise ConfigError(
                f"placement.faults has a fault of {COORDINATOR} at merge {fault.step} "
                f"that is not emulated; give {COORDINATOR}@{fault.step}:kill or "
                f"{COORDINATOR}@{fault.step}:pauseSECONDS, or use diloco run"
            )
        if not fault.kills and fault.pause_s is None:
            raise ConfigError(
                f"placement.faults has {fault.who}@{fault.step} with other parameters "
                f"or steps, which no emulated island has; leave it out, or use diloco "
                f"run"
            )
    pauses = {
        f"placement.faults, {f.who}@{f.step}": f.pause_s for f in faults if f.pause_s
    }
    options.require_reach(len(config.islands), deadlines.report_s, pauses)


def run(
    config: Config,
    config_path: str,
    console: Console,
    options: EmulationOptions,
    replayed: Callable[[], ForkPoint | None] = lambda: None,
) -> dict[str, Any]:
    """Run `diloco emulate` and return the summary.

    Progress and report go to `console`; with a workdir, the results go there. replayed:
    repeats a recorded run up to the point at which this one begins.
    """
    check(config, options)
    compilation.use_cache(compilation.of_user())
    with contextlib.ExitStack() as whole:
        begun = None
        if config.placement.workdir:
            from diloco_jax.cluster.run import Beginning

            config = resolve(config)
            begun = whole.enter_context(Beginning(config, config_path))
            config = begun.create()
        try:
            since = replayed()
            with Dashboard(console) as dashboard:
                if note := inner_note(config.run):
                    console.print(note, highlight=False, soft_wrap=True)
                result = emulate(
                    config,
                    options=options,
                    show=lambda status: dashboard.show(status, time.monotonic()),
                    since=since,
                )
            report = closing_report(result.summary)
            console.print(f"\n{report}", highlight=False, soft_wrap=True)
            if begun is not None:
                result.write(begun.workdir)
        except BaseException:
            # This covers an interruption: nothing is kept, and the next run may have
            # the folder.
            _settle()
            if begun is not None:
                begun.undo()
                text = f"nothing is kept: {begun.workdir} is as it was before"
                console.print(text, highlight=False, soft_wrap=True)
            raise
    return result.summary


def _settle() -> None:
    """Wait for dispatched work: a process that ends under it ends by a signal."""
    for array in jax.live_arrays():  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):  # It may be donated.
            array.block_until_ready()


class _Emulator(StoreMerging):
    """One emulation; `run` runs it."""

    def __init__(
        self,
        config: Config,
        options: EmulationOptions,
        show: Show,
        since: ForkPoint | None,
    ) -> None:
        data = load_data(config.run)
        if options.skip_rows:
            data = data.skipping(options.skip_rows)
            config = config.replace("data.arrays", data.arrays)
        run, placement = config.run, config.placement
        require_repeatable(placement, "emulation")
        self._config, self._show, self._since = config, show, since
        self._judge = Judge(config, data)
        self._readers = readers(config, data, self._judge.trainer.fields, options)
        model = self._judge.model
        plan = build_plan(run, model)
        passes = compilation.passes_of(placement.merge_route)
        first = None if since else first_pieces(run, model)
        store = Store(run, plan, first, placement.deadlines.pin_s, passes)
        super().__init__(store)
        for fragment, (version, arrays) in enumerate(since.fragments if since else ()):
            tiles = zip(plan.fragments[fragment], arrays["anchor"], strict=True)
            values = [piece.grid.from_tiles(np.asarray(own)) for piece, own in tiles]
            store.load(fragment, {**store.first(fragment, values), **arrays}, version)
        self._world = EmulatedWorld(
            config,
            options,
            plan.sizes,
            tuple(layout.total_bytes for layout in store.layouts_up),
            self,
            self._make_body,
            (since.log, since.seconds) if since else ((), 0.0),
        )
        self._evaluations: list[tuple[float, int, float]] = []
        self._next_show_s = 0.0

    def run(self) -> Emulation:
        """Run until every token is merged or lost."""
        self._world.run_to_end()
        self._show({**self._world.status(), "phase": "evaluating"})
        return self._world.result(
            self._judge,
            self.store.params(),
            self._world.merges,
            self._evaluations,
            **({} if self._since is None else {"forked": self._since.about}),
        )

    def _make_body(self, name: str) -> TrainedBody:
        run, (*before, diary) = self._config.run, self._world.diaries[name]
        model, trainer = trainer_of(run, self._config.islands[name])
        reader, kept = self._readers[name], None
        if self._since is not None and not before:
            kept = self._since.islands.get(name)
        return TrainedBody(run, model, trainer, reader, self._world.clock, diary, kept)

    # ---- what is told ---------------------------------------------------------------

    def receive(self, key: DeltaKey, encoded: EncodedDelta) -> Received:
        self._world.delivered(key)
        return super().receive(key, encoded)

    def commit(self, fragment: int, version: Version) -> None:
        (merge, merged, digest), world = self.computed[fragment], self._world
        if world.flushes(merge):
            self._evaluate()
        super().commit(fragment, version)
        measures = (math.nan if m is None else m for m in merged.measures)
        if world.merged(merge, merged.norm, digest, *measures):
            self._evaluate()
        if time.monotonic() >= self._next_show_s:
            self._show(world.status())
            self._next_show_s = time.monotonic() + SHOW_EVERY_S

    def _evaluate(self) -> None:
        """Evaluate the parameters of the last merge."""
        now, tokens, *_ = self._world.merges[-1]
        self._evaluations.append((now, tokens, self._judge.loss(self.store.params())))


class Judge:
    """Evaluates global parameters on the run's validation data."""

    def __init__(self, config: Config, data: Data) -> None:
        run, self._data = config.run, data
        self.model, self.trainer = trainer_of(run, IslandConfig(batch_size=BATCH_SIZE))
        self._length = run.sequence_length
        validation = ValidationBatches(
            data.validation,
            BATCH_SIZE,
            self.trainer.fields,
            self._length,
            bytes_per_token=data.bytes_per_token,
        )
        batches = config.placement.evaluate_batches
        self._evaluator = Evaluator(self.trainer, validation, 1, batches)

    def loss(self, params: Params) -> float:
        """Return the loss on `placement.evaluate_batches` batches, in nats per
        token."""
        placed = self.trainer.place_params(params)
        while (loss := self._evaluator.advance(placed)) is None:
            pass
        return loss

    def evaluation(self, params: Params) -> dict[str, Any]:
        """Return what a summary says of these parameters, by all of the data."""
        placed = self.trainer.place_params(params)
        return as_json(of_data(self._data, self._length, self.trainer, placed))


def readers(
    config: Config, data: Data, fields: Fields, options: EmulationOptions
) -> dict[str, BatchReader]:
    """Return the rows of each island by position, in batches: of all data, or of a part
    of its own."""
    names, seed = sorted(config.islands), config.run.seed
    rows: list[Rows] = [data.index(seed)] * len(names)
    if options.unlike_shards:
        rows = [GlobalIndex(part, seed) for part in data.parts(len(names))]
    length = config.run.sequence_length
    each = zip(names, rows, strict=True)
    return {name: BatchReader(own, fields, length) for name, own in each}
