"""`diloco emulate`: all islands of a config with real gradients, in virtual time.

The runtime's own parts decide, take steps, take deltas and merge.
These are missing: wire, threads, disks (an island that returns begins with fresh
moments), and islands' own validation (`placement.evaluate_every_steps`). Equal inputs
give equal bits. A pause among the faults makes one step longer; the island's reports go
on meanwhile. A coordinator that is killed or paused is away, and each time comes back
from its records, with Theta as it was. `Attendance` starts islands, lets them fail and
leave. An emulation may go on from a `ForkPoint`, as the recorded run would after a stop
there.
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
from diloco_jax.core.fragment_merge import MergeResult
from diloco_jax.core.fragments import Params
from diloco_jax.data.loading import Data, GlobalIndex, load_data
from diloco_jax.data.reader import BatchReader, ValidationBatches
from diloco_jax.data.source import Fields, Rows
from diloco_jax.evaluation import BATCH_SIZE, as_json, of_data
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.files import digest_of, write_json
from diloco_jax.island.device.exchange import Restored
from diloco_jax.island.loop import Evaluator
from diloco_jax.models.build import build_plan, inner_note
from diloco_jax.observability.history import History
from diloco_jax.observability.terminal import Dashboard, closing_report
from diloco_jax.process import crashes_in_a_row
from diloco_jax.protocol.coordinator.ledger import Tally
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import DeltaKey, Version, lookahead_of
from diloco_jax.protocol.records import Durable
from diloco_jax.simulation.bodies import (
    Diary,
    StoreMerging,
    TrainedBody,
    collect,
    deaths,
    trainer_of,
)
from diloco_jax.simulation.clock import durations
from diloco_jax.simulation.coordinator import Merging, VirtualCoordinator, World
from diloco_jax.simulation.emulation_options import EmulationOptions
from diloco_jax.simulation.island import Body, IslandSpec
from diloco_jax.weights.first import first_pieces, require_repeatable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LIVES_IN_VAIN = 1000
"""Failures of machines in a row, of all islands together, without progress between
them. After this number the run would go on for ever.
"""


class Attendance:
    """Starts and ends of islands, as config and options say.

    A kill of `placement.faults` is a crash. `diloco run` restarts the island after at
    most `placement.restarts` crashes in a row; after one more it gives the island up. A
    random failure is one of the machine: when the machine is back, its launcher counts
    anew.

    bytes_up: bytes of an encoded delta, by fragment.
    """

    def __init__(
        self,
        config: Config,
        options: EmulationOptions,
        world: World,
        bytes_up: tuple[int, ...],
    ) -> None:
        self.diaries: dict[str, list[Diary]] = {n: [] for n in sorted(config.islands)}
        """Diaries of all incarnations, by island."""
        self._config, self._options, self._world = config, options, world
        self._clock, self._bytes_up = world.clock, bytes_up
        self._crashes: Counter[str] = Counter()
        """Crashes in a row since the island's machine was last started."""
        self._in_vain = self._progress_tokens = 0
        self._faults = parse_faults(config.placement.faults, config.islands).faults
        before, policy = world.coordinator.state, world.coordinator.config
        sums = Tally().of(policy, before)
        self._before = {
            name: sums[name].totals(policy, island.computed_tokens)
            for name, island in before.islands.items()
        }
        """Tokens of each island before the emulation began."""
        now, always = world.clock.now, (0.0, math.inf)
        self._stays = {
            name: (now + start, now + stop)
            for name in self.diaries
            for start, stop in (options.joins.get(name, always),)
        }
        for name, (start, stop) in self._stays.items():
            self._clock.at(start, functools.partial(self._start, name))
            if stop < math.inf:
                self._clock.at(stop, functools.partial(self._leave, name))

    def update(self) -> None:
        """Bring the diaries of live incarnations up to date."""
        for name, diaries in self.diaries.items():
            for diary in diaries[-1:]:
                if diary.ended is None:
                    diary.steps = self._world.islands[name].steps

    def close(self) -> None:
        """Close all diaries at the end of the run."""
        for name in self.diaries:
            self._close(name, "finished")

    def roster(self) -> Roster:
        """Return the roster that a coordinator would hold by now."""
        self.update()
        roster = Roster()
        roster.before = self._before
        for name, diaries in self.diaries.items():
            for diary in diaries:
                now = self._clock.now if diary.ended is None else diary.ended
                roster.hello(diary, diary.began)
                roster.report(name, diary.measures(), (), now)
                roster.members[name].adopted = {f: v for f, v, _ in diary.adoptions}
                if diary.end == "left":
                    roster.left(name, now)
            roster.failures.add(deaths(diaries))
        return roster

    @property
    def given_up(self) -> list[str]:
        """Islands with more crashes in a row than restarts."""
        restarts = self._config.placement.restarts
        return [name for name in self.diaries if self._crashes[name] > restarts]

    # ---- what happens ---------------------------------------------------------------

    def _start(self, name: str) -> None:
        if self._world.coordinator.finished or self._clock.now >= self._stays[name][1]:
            return
        options, island = self._options, self._config.islands[name]
        incarnation = self._world.next_incarnation(name)
        self.diaries[name].append(
            Diary(
                island=name,
                incarnation=incarnation,
                tokens_per_step=island.batch_size * self._config.run.sequence_length,
                began=self._clock.now,
                compile_seconds=options.join_seconds,
            )
        )
        chance = np.random.default_rng(
            (options.chance_seed, list(self.diaries).index(name), incarnation)
        )
        if options.failure_every_seconds:
            lasts_s = chance.exponential(options.failure_every_seconds)
            fail = functools.partial(self._kill, name, incarnation, crash=False)
            self._clock.after(lasts_s, fail)
        seconds = durations(island.step_seconds, options.step_spread, chance)
        self._world.start(
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
            kill = functools.partial(self._kill, name, diary.incarnation, crash=True)
            self._clock.after(seconds, kill)
        diary.rows[-1][1] = seconds
        return seconds

    def _kill(self, name: str, incarnation: int, *, crash: bool) -> None:
        """Kill this incarnation if it still runs: its process ends, or its machine is
        taken away. See `cluster.processes` for how often a process comes back."""
        island = self._world.islands[name]
        if island.incarnation != incarnation or island.ended is not None:
            return
        self._world.kill(name)
        self._close(name, "died")
        lasted_s = self._clock.now - self.diaries[name][-1].began
        crashes = crashes_in_a_row(self._crashes[name], lasted_s) if crash else 0
        self._crashes[name] = crashes
        if name not in self.given_up:
            again = functools.partial(self._start, name)
            self._clock.after(self._options.down_seconds, again)
        if not crash:
            self._require_progress()

    def _require_progress(self) -> None:
        tokens = self._world.coordinator.state.progress_tokens
        self._in_vain = self._in_vain + 1 if tokens == self._progress_tokens else 0
        self._progress_tokens = tokens
        if self._in_vain >= LIVES_IN_VAIN:
            raise ConfigError(
                f"failure_every_seconds = {self._options.failure_every_seconds:g}: the "
                f"last {LIVES_IN_VAIN} lives of islands brought no progress, and at "
                f"{self._clock.now:g} s the run has {tokens} of its "
                f"{self._config.run.total_tokens} tokens; raise it well above the "
                f"seconds of a join and of sync.steps_per_cycle steps"
            )

    def _leave(self, name: str) -> None:
        island = self._world.islands[name]
        if island.ended is None:
            island.leave("stopped")
            self._close(name, "left")

    def _close(self, name: str, why: str) -> None:
        self.update()
        for diary in self.diaries[name][-1:]:
            if diary.ended is None:
                diary.ended, diary.end = self._clock.now, why


Show = Callable[[dict[str, Any]], None]
"""Callback for the status of the run, about once a second, as in `diloco status`."""

RUN_ID = "emulated"
SHOW_EVERY_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    def _repr_html_(self) -> str:
        names = ("eval_loss", "tokens_merged", "tokens_lost", "merges", "goodput")
        numbers = {
            **self.summary,
            "tokens_lost": sum(self.summary["tokens_lost"].values()),
        }
        rows = {
            name: f"{number:,}" if isinstance(number, int) else f"{number:.5g}"
            for name, number in ((name, numbers[name]) for name in names)
        }
        return as_html(
            {**rows, "virtual seconds": f"{self.summary['wall_seconds']:,.1f}"}
        )

    def write(self, workdir: Path) -> None:
        """Write `history/*.csv` and `summary.json`."""
        self.history.write(workdir / "history")
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
    options = options or EmulationOptions()
    check(config, options)
    show = show or (lambda status: None)
    return _Emulator(resolve(config), options, show, since).run()


def check(config: Config, options: EmulationOptions) -> None:
    """Raise ConfigError if this cannot be emulated."""
    require_section("config", config, Config)
    config.validate()
    options.validate(config.islands)
    deadlines = config.placement.deadlines
    options.require_reach(len(config.islands), deadlines.report_s)
    for name, island in config.islands.items():
        if not island.step_seconds > 0:
            raise ConfigError(
                f"islands.{name}.step_seconds = {island.step_seconds:g}; virtual time "
                f"goes by it: give the seconds of a step, as in "
                f"--islands.{name}.step-seconds 0.5"
            )
    for fault in parse_faults(config.placement.faults, config.islands).faults:
        waits = fault.kills or (fault.pause_s is not None and fault.pause_s < math.inf)
        away = waits and not fault.prepared and fault.incarnation == 1
        if fault.who == COORDINATOR and not away:
            raise ConfigError(
                f"placement.faults has a fault of {COORDINATOR} at merge {fault.step} "
                f"that is not emulated; give {COORDINATOR}@{fault.step}:kill or "
                f"{COORDINATOR}@{fault.step}:pauseSECONDS, or use diloco run"
            )
        if fault.of_steps:
            raise ConfigError(
                f"placement.faults has {fault.who}@{fault.step} with other parameters "
                f"or steps, which no emulated island has; leave it out, or use diloco "
                f"run"
            )


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
            dashboard = whole.enter_context(Dashboard(console))
            if note := inner_note(config.run):
                console.print(note, highlight=False, soft_wrap=True)
            result = emulate(
                config,
                options=options,
                show=lambda status: dashboard.show(status, time.monotonic()),
                since=since,
            )
        except BaseException:
            # This covers an interruption: nothing is kept, and the next run may have
            # the folder.
            _settle()
            if begun is not None:
                begun.undo()
                text = f"nothing is kept: {begun.workdir} is as it was before"
                console.print(text, highlight=False, soft_wrap=True)
            raise
        if begun is not None:
            result.write(begun.workdir)
    report = closing_report(result.summary)
    console.print(f"\n{report}", highlight=False, soft_wrap=True)
    return result.summary


def _settle() -> None:
    """Wait for dispatched work: a process that ends under it ends by a signal."""
    for array in jax.live_arrays():  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):  # It may be donated.
            array.block_until_ready()


class _Emulator:
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
        self._config, self._options, self._show = config, options, show
        self._since = since
        self._judge = Judge(config, data)
        self._readers = readers(config, data, self._judge.trainer.fields, options)
        model = self._judge.model
        plan = build_plan(run, model)
        deadlines = placement.deadlines
        passes = compilation.passes_of(placement.merge_route)
        require_repeatable(placement, "emulation")
        first = None if since else first_pieces(run, model)
        self._store = Store(run, plan, first, deadlines.pin_s, passes)
        for fragment, (version, arrays) in enumerate(since.fragments if since else ()):
            tiles = zip(plan.fragments[fragment], arrays["anchor"], strict=True)
            values = [piece.grid.from_tiles(np.asarray(own)) for piece, own in tiles]
            whole = {**self._store.first(fragment, values), **arrays}
            self._store.load(fragment, whole, version)
        self._alerts: deque[str] = deque(maxlen=ALERTS_KEPT)
        self._world = world_of(
            config,
            options,
            plan.sizes,
            StoreMerging(self._store, self._arrived, self._committed),
            self._make_body,
            self._alerts.append,
            (since.log, since.seconds) if since else ((), 0.0),
        )
        self._clock = self._world.clock
        bytes_up = tuple(layout.total_bytes for layout in self._store.layouts_up)
        self._attendance = Attendance(config, options, self._world, bytes_up)
        self._merges: list[tuple[Any, ...]] = []
        self._evaluations: list[tuple[float, int, float]] = []
        self._evaluate_at_tokens = options.evaluate_every_tokens
        self._next_show_s = 0.0

    def run(self) -> Emulation:
        """Run until every token is merged or lost."""
        self._world.run()
        coordinator, now = self._coordinator, self._clock.now
        if not coordinator.finished:
            why, remedy = "joins", "let an island stay to the end"
            if given_up := self._attendance.given_up:
                restarts = self._config.placement.restarts
                why = f"placement.restarts = {restarts} is less than the kills of "
                why, remedy = why + ", ".join(given_up), "raise it, take faults out"
            raise ConfigError(
                f"{why}: at {now:g} s no island is left, and the run has "
                f"{coordinator.state.progress_tokens} of its "
                f"{self._config.run.total_tokens} tokens; {remedy}, or lower "
                f"total_tokens"
            )
        self._attendance.close()
        self._show({**self._status(), "phase": "evaluating"})
        params = self._store.params()
        if self._options.evaluate_every_tokens and self._merges:
            # The last merges, of the flush, come after the last tokens.
            add_last(self._evaluations, self._merges[-1], self._judge.loss(params))
        return emulation(
            self._config,
            self._world,
            self._attendance,
            self._alerts,
            collect(self._attendance.diaries, self._merges, self._evaluations),
            self._judge,
            params,
            **({} if self._since is None else {"forked": self._since.about}),
        )

    @property
    def _coordinator(self) -> VirtualCoordinator:
        """The present life of the coordinator."""
        return self._world.coordinator

    def _make_body(self, name: str) -> TrainedBody:
        run, (*before, diary) = self._config.run, self._attendance.diaries[name]
        model, trainer = trainer_of(run, self._config.islands[name])
        reader, kept = self._readers[name], None
        if self._since is not None and not before:
            kept = self._since.islands.get(name)
        return TrainedBody(run, model, trainer, reader, self._clock, diary, kept)

    # ---- what is told ---------------------------------------------------------------

    def _arrived(self, key: DeltaKey) -> None:
        first, *_ = diaries = self._attendance.diaries[key.island]
        diary = diaries[key.incarnation - first.incarnation]
        diary.delivered(key.fragment, self._clock.now)

    def _committed(self, merge: Merge, merged: MergeResult) -> None:
        now, tokens = self._clock.now, self._coordinator.state.progress_tokens
        parts: Counter[str] = Counter()
        for c in merge.contributions:
            parts[c.island] += c.tokens
        self._merges.append(
            (
                now,
                tokens,
                merge.fragment,
                merge.version.number,
                merge.final,
                [parts.get(name, 0) for name in self._attendance.diaries],
                merge.share,
                merged.norm,
                digest_of(merged.payload),
                *(math.nan if m is None else m for m in merged.measures),
            )
        )
        every = self._options.evaluate_every_tokens
        if every and tokens >= self._evaluate_at_tokens:
            self._evaluate_at_tokens = tokens - tokens % every + every
            loss = self._judge.loss(self._store.params())
            self._evaluations.append((now, tokens, loss))
        if time.monotonic() >= self._next_show_s:
            self._show(self._status())
            self._next_show_s = time.monotonic() + SHOW_EVERY_S

    def _status(self) -> dict[str, Any]:
        return summary.status(
            self._coordinator.config,
            self._coordinator.state,
            self._attendance.roster(),
            seconds=self._clock.now,
            alerts=list(self._alerts),
            now=self._clock.now,
        )


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
    rows: dict[str, Rows]
    if options.unlike_shards:
        parts = zip(names, data.parts(len(names)), strict=True)
        rows = {name: GlobalIndex(part, seed) for name, part in parts}
    else:
        rows = dict.fromkeys(names, data.index(seed))
    length = config.run.sequence_length
    return {name: BatchReader(own, fields, length) for name, own in rows.items()}


def world_of(
    config: Config,
    options: EmulationOptions,
    sizes: tuple[int, ...],
    merging: Merging,
    make_body: Callable[[str], Body],
    alert: Callable[[str], None],
    before: tuple[Sequence[Durable], float] = ((), 0.0),
) -> World:
    """Return the world of an emulation, before an island starts. sizes: parameters by
    fragment; see `World` for the others."""
    placement = config.placement
    chance = np.random.default_rng(options.chance_seed)
    seconds = durations(options.merge_seconds, options.merge_spread, chance)
    return World(
        config.run,
        policy_config(config.run, placement, RUN_ID, sizes),
        merging,
        report_s=placement.deadlines.report_s,
        line_speed=options.line,
        make_body=make_body,
        alert=alert,
        merge_seconds=lambda merge: next(seconds),
        outages={
            fault.step: options.down_seconds if fault.pause_s is None else fault.pause_s
            for fault in parse_faults(placement.faults, config.islands).faults
            if fault.who == COORDINATOR
        },
        before=before,
    )


def add_last(
    evaluations: list[tuple[float, int, float]], merge: Sequence[Any], loss: float
) -> None:
    """Add the loss after the last merge of a run, if it is not there yet. merge: its
    row, which begins with time and tokens."""
    now, tokens, *_ = merge
    if evaluations[-1:] != [(now, tokens, loss)]:
        evaluations.append((now, tokens, loss))


def emulation(
    config: Config,
    world: World,
    attendance: Attendance,
    alerts: Sequence[str],
    history: History,
    judge: Judge,
    params: Params,
    **more: Any,
) -> Emulation:
    """Return the result of a run that is over, with these parameters. more: fields of
    the summary."""
    coordinator, now, roster = world.coordinator, world.clock.now, attendance.roster()
    result = summary.summary(
        coordinator.config,
        coordinator.state,
        roster,
        wall_seconds=now - world.began_s,
        alerts=[*alerts, *summary.missing(config, roster)],
        now=now,
    )
    return Emulation(
        config=config,
        history=history,
        summary={
            **result,
            **summary.rows_by_source(config.run.data, coordinator.state),
            **judge.evaluation(params),
            **more,
        },
        params=params,
    )
