"""`diloco fork`: a recorded run repeated up to a merge, and on under other settings.

What goes on is an emulation. It begins as the run would have after a stop of all its
processes at that merge: with the coordinator's records and parameters of then, and with
each island's moments and residuals at its last take that is merged by then. So nothing
is in it that the run computed later. Without another setting, a fork is the run itself,
repeated to its end.

Nothing heavy is imported before the tape is read: replay sets the environment that jax
reads when it is imported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diloco_jax import before_jax, run_files
from diloco_jax.config import Config, ConfigError, differences, shared_fields
from diloco_jax.config.fields import NOT_NEGATIVE, setting
from diloco_jax.config.options import TRUST_CODE
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.observability.history import PAPER, History, read_history
from diloco_jax.observability.tape import TapeError
from diloco_jax.observability.terminal import bar
from diloco_jax.protocol.messages import Span
from diloco_jax.protocol.records import Extended, Stopping
from diloco_jax.simulation.emulation_options import EmulationOptions
from diloco_jax.simulation.replay.recording import (
    Recording,
    RepeatError,
    Who,
    read_recording,
)
from diloco_jax.workdir import read_config

if TYPE_CHECKING:
    from diloco_jax.simulation.emulate import ForkPoint

CHANGED = (
    *("inner.", "outer.", "sync.", "total_tokens"),
    *("islands.", "placement.", "option."),
)
"""Settings, by how their names begin, that a fork may have otherwise."""
STAY = (
    *("inner.optimizer", "inner.arguments", "inner.moment_dtype"),
    *("sync.fragments", "sync.fragment_by", "sync.weights_by_use"),
)
"""Those of them that say what parameters, moments and deltas consist of."""
AFRESH = {
    "sync.merge": "merge",
    "outer.optimizer": "outer",
    "outer.norm_guard": "outer",
}
"""Those whose state begins afresh if they change, and its name in `Store.arrays`."""
WHERE = ("in the fork", "in the run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkOptions(EmulationOptions):
    """The options of `diloco fork`."""

    at: int = setting(
        0,
        NOT_NEGATIVE,
        metavar="MERGE",
        help="The last merge of the run that the fork shares, counted from 1.",
    )
    skip_merges: tuple[int, int] = setting(
        (0, 0),
        metavar="FIRST LAST",
        help="Merges of the run: what they were trained on is added to --skip-rows.",
    )
    without: tuple[str, ...] = setting(
        (), help="Islands of the run that do not take part in the fork."
    )
    also: Mapping[str, str] = setting(
        {},
        metavar="[NEW LIKE ...]",
        help="Islands that the run does not have, each with the name of one that it is "
        "like. They begin with fresh moments.",
    )
    trust_code: bool = setting(False, help=TRUST_CODE)
    json: bool = setting(
        False,
        help="Print one JSON object: the summary, or without another setting what "
        "diloco replay prints.",
    )


def as_recorded(workdir: Path, *, trust_code: bool = False) -> Config:
    """Return a run's config as a fork of it begins: without its folders and faults."""
    config = read_config(workdir, trust_code=trust_code)
    placement = dataclasses.replace(
        config.placement, workdir="", checkpoints="", faults=()
    )
    return dataclasses.replace(config, placement=placement)


def run(
    workdir: Path, recorded: Config, config: Config, options: ForkOptions
) -> tuple[int, dict[str, Any]]:
    """Run `diloco fork`; return the exit code and what `--json` prints.

    recorded: `as_recorded`. config: the same with other settings. Raises ConfigError,
    where possible before anything is repeated.
    """
    console = Console(stderr=True, markup=False)
    changes = require_forkable(recorded, config, options, workdir)
    config = with_islands(config, options)
    new = Path(config.placement.workdir) if config.placement.workdir else None
    if new is not None and new.resolve() == workdir.resolve():
        raise ConfigError(f"--workdir {new} is the run itself; name a new folder")
    try:
        with bar(console, "reading the tape") as report:
            read = functools.partial(
                read_recording,
                workdir,
                text=config.run.data.paths,
                trust_code=options.trust_code,
                report=report,
            )
            recording = whole = read(options.at, asked="--at")
            if last := options.skip_merges[1] if changes else whole.merges_on_tape:
                whole = read(last, asked="--skip-merges")
        recording.prepare_environment()
        if changes:
            return EXIT_DONE, _go_on(recording, whole, config, options, changes)
        if new is not None and new.exists():
            raise ConfigError(f"--workdir {new} exists already; name a new folder")
        _say(console, "no setting is changed, so the fork is the run itself, repeated")
        from diloco_jax.simulation.replay import replay

        outcome = replay.run(whole, console, new)
        _say(console, str(outcome))
        code = EXIT_DONE if outcome.identical else EXIT_FAILED
        return code, dataclasses.asdict(outcome)
    except TapeError as error:
        raise ConfigError(str(error)) from error
    except RepeatError as error:
        raise ConfigError(f"{error}. {_otherwise(workdir)}") from error


def require_forkable(
    recorded: Config, config: Config, options: ForkOptions, workdir: Path
) -> list[str]:
    """List the settings that are not those of the run, with both values; raise
    ConfigError for one that a fork cannot have."""
    placement = dataclasses.replace(config.placement, workdir="")
    usual = ForkOptions(at=options.at, trust_code=options.trust_code, json=options.json)
    ours, theirs = (
        {
            **shared_fields(one.run),
            "islands": {n: shared_fields(i) for n, i in one.islands.items()},
            "placement": dataclasses.asdict(placed),
            "option": dataclasses.asdict(given),
        }
        for one, placed, given in (
            (config, placement, options),
            (recorded, recorded.placement, usual),
        )
    )
    changes = differences(ours, theirs, WHERE)
    for line in changes:
        name = line.partition(":")[0]
        if name in STAY or not name.startswith(CHANGED):
            raise ConfigError(
                f"{line}: a fork goes on with the run's parameters, moments and order "
                f"of the data; leave --{name} out. {_otherwise(workdir)}"
            )
    first, last = options.skip_merges
    skips = any(options.skip_merges)
    if not options.at or (skips and not options.at < first <= last):
        raise ConfigError(
            f"at = {options.at}, skip_merges = {first} {last}; give --at, the last "
            f"merge that the fork shares with the run, counted from 1, and beyond it "
            f"the first and the last merge whose rows are skipped, if any"
        )
    return changes


def with_islands(config: Config, options: ForkOptions) -> Config:
    """Return the config with the islands that the options add and take away."""
    islands, has = dict(config.islands), ", ".join(config.islands)
    for name, like in options.also.items():
        if name in islands:
            raise ConfigError(
                f"also has {name!r}, which the run has already ({has}); give another "
                f"name, or change it by --islands.{name}.batch-size and so on"
            )
        islands[name] = config.island(like)
    for name in options.without:
        config.island(name)
        islands.pop(name, None)
    places: dict[str, Any] = {
        field: {n: v for n, v in getattr(config.launch, field).items() if n in islands}
        for field in ("zones", "purchase", "clusters")
    }
    launch = dataclasses.replace(config.launch, **places)
    return dataclasses.replace(config, islands=islands, launch=launch).validate()


def rows_of(recording: Recording, first: int, last: int) -> list[tuple[int, int]]:
    """Return the rows that these merges were trained on, as `skip_rows` has them."""
    from diloco_jax.data.loading import load_data
    from diloco_jax.data.reader import LeasedPositions

    run, drawn = recording.config.run, set[int]()
    index = load_data(run).index(run.seed)
    steps: dict[Who, list[tuple[int, int]]] = {}
    for merge in recording.merges[first - 1 : last]:
        for part in merge.made.contributions:
            who = Who(part.island, part.incarnation)
            steps.setdefault(who, []).append((part.start, part.end))
    for who, parts in steps.items():
        life, leased = recording.lives[who], LeasedPositions()
        for _, record in life.records:
            if record.kind == "granted":
                leased.grant(Span(record.start, record.stop))
        size = life.config.batch_size
        positions = leased.draw(max(end for _, end in parts) * size)
        assert positions is not None, f"{who} made steps without data"
        for start, end in parts:
            drawn.update(map(int, positions[start * size : end * size]))
    return [(row, row + 1) for row in sorted(set(map(index.number, drawn)))]


def _go_on(
    recording: Recording,
    whole: Recording,
    config: Config,
    options: ForkOptions,
    changes: list[str],
) -> dict[str, Any]:
    """Repeat the recording, and emulate the run from there; return the summary. whole:
    the recording with the merges whose rows are skipped."""
    console, workdir = Console(stderr=True, markup=False), recording.workdir
    ends = [r for r in recording.log if isinstance(r, Stopping | Extended)]
    if ends and isinstance(ends[-1], Stopping):
        raise ConfigError(
            f"--at {options.at}: {workdir} had its {ends[-1].tokens} tokens before "
            f"that merge, and no island made a step after it; choose an earlier one"
        )
    before_jax.set_devices(max(island.devices for island in config.islands.values()))
    from diloco_jax.data.loading import load_data
    from diloco_jax.models.build import build, build_plan
    from diloco_jax.simulation import emulate

    plan = build_plan(config.run, build(config.run))
    if plan.digest() != recording.plan_digest:
        raise ConfigError(
            f"{'; '.join(changes)}: the plan of fragments has digest "
            f"{recording.plan_digest} in the run and {plan.digest()} with these, since "
            f"merge rule and outer optimizer say what may be cut; leave that one out. "
            f"{_otherwise(workdir)}"
        )
    if options.skip_merges[1]:
        rows = (*options.skip_rows, *rows_of(whole, *options.skip_merges))
        options = dataclasses.replace(options, skip_rows=rows)
    load_data(config.run).skipping(
        options.skip_rows
    )  # Or it is refused, before replay.
    history = read_history(workdir)
    lives = history.frame("lives").query("steps > 0")
    paces = (lives.ended - lives.first_step) / lives.steps
    mean_s = paces.groupby(lives.island).last()
    islands = {
        name: dataclasses.replace(
            island,
            step_seconds=island.step_seconds
            or float(mean_s.get(options.also.get(name, name), 0.0)),
        )
        for name, island in config.islands.items()
    }
    config = dataclasses.replace(config, islands=islands)
    _say(console, f"{workdir} after merge {options.at}; {'; '.join(changes)}")
    about = {"workdir": str(workdir), "merge": options.at, "changes": changes}
    began_s = float(history.merges["time"][options.at - 1])
    summary = emulate.run(
        config,
        str(workdir),
        console,
        options,
        lambda: point_of(recording, config, began_s, about, console),
    )
    if config.placement.workdir:
        path = Path(config.placement.workdir) / run_files.FORK_PLOT
        write_plot(history, path, f"{workdir.name}, and on from merge {options.at}")
        _say(console, f"plot: {path}")
    return summary


def point_of(
    recording: Recording,
    config: Config,
    seconds: float,
    about: Mapping[str, Any],
    console: Console,
) -> ForkPoint:
    """Repeat the recorded run, and return its state at the end, for a fork of this
    config. seconds: of the run by then.

    Raises TapeError, or RepeatError if a merge has other bits here.
    """
    from diloco_jax.simulation.emulate import ForkPoint
    from diloco_jax.simulation.replay.replay import Replay

    newest = {who.island: who for who in sorted(recording.lives)}
    try:
        with Replay(recording, newest.values()) as replay:
            _, wrong = replay.compare(console)
            if wrong is not None:
                raise RepeatError(
                    f"merge {wrong['merge']} has digest {wrong['digest_on_tape']} on "
                    f"the tape, {wrong['digest']} here (line {wrong['line']})"
                )
            fragments = replay.fragments()
            shared = newest.keys() & config.islands.keys()
            kept = {name: replay.state(newest[name]) for name in shared}
            if not config.run.sync.error_feedback:
                kept = {n: one._replace(residuals={}) for n, one in kept.items()}
    except ConfigError as error:
        raise RepeatError(str(error)) from error
    ours, theirs = shared_fields(config.run), shared_fields(recording.config.run)
    for line in differences(ours, theirs):
        fresh = AFRESH.get(line.partition(":")[0], "")
        for _, arrays in fragments:
            arrays.pop(fresh, None)
    for name in config.islands:
        what = "fresh moments"
        if name in kept:
            what = f"moments of incarnation {kept[name].incarnation}"
            what += f" after step {kept[name].steps}"
        _say(console, f"island {name}: {what}")
    return ForkPoint(
        log=recording.log,
        fragments=fragments,
        islands=kept,
        seconds=seconds,
        about=about,
    )


def write_plot(parent: History, path: Path, title: str) -> None:
    """Draw the losses of a run and of its fork into the fork's workdir."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    read_history(path.parent).plot_loss(parent=parent, title=title, axes=axes)
    figure.savefig(path, dpi=120)


def _otherwise(workdir: Path) -> str:
    return (
        f"What no fork can have, a new run can: `diloco export {workdir} DIR --cycle "
        f"C` writes the parameters of a kept cycle, and `diloco run CONFIG --init "
        f"hf:DIR` begins from them, with fresh moments and no promise of bits"
    )


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
