"""`diloco simulate KIND` and `diloco replay`: options in, text or one JSON object out.

Nothing heavy is imported before a command needs it: replay sets the environment that
jax reads when it is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from diloco_jax.config.fields import setting
from diloco_jax.config.options import WorkdirOptions, parse
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, ConfigError, suggest
from diloco_jax.files import require_writable
from diloco_jax.observability.logs import setup_logging
from diloco_jax.observability.tape import TapeError
from diloco_jax.simulation.output import (
    Columns,
    Progress,
    bar,
    nobody,
    or_dash,
    show,
    table,
    tell,
)

ConfigT = TypeVar("ConfigT")
OutputT = TypeVar("OutputT", bound="Output")
Shown = tuple[dict[str, Any], Table | str]
"""Findings of a simulation, as JSON-compatible builtins and for people."""


@dataclasses.dataclass(frozen=True)
class Output:
    """Options of the output."""

    json: bool = setting(False, help="Print one JSON object to standard output.")


@dataclasses.dataclass(frozen=True)
class SweepOutput(Output):
    """Options of the output of a command that may sweep."""

    sweep: bool = setting(False, help="Go over methods, chips and islands.")
    out: Path = setting(
        Path(), help="Folder for goodput.csv and goodput.png of a sweep."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions(WorkdirOptions):
    """The options of `diloco replay`."""

    until: int | None = setting(
        None, help="The last merge to repeat, counted from 1; None = all."
    )
    save: Path | None = setting(
        None,
        help="New folder for the global parameters at the end, which diloco eval "
        "reads; None = they are not saved.",
    )


def simulate_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate KIND [options]`."""
    kind = arguments[0] if arguments else "--help"
    if kind in ("-h", "--help"):
        usage = "usage: diloco simulate KIND ...   "
        print(f"{usage}(diloco simulate KIND --help tells more)\n")
        for name, (_, does) in KINDS.items():
            print(f"  {name:<10} {does}")
        return EXIT_DONE
    if kind not in KINDS:
        raise ConfigError(
            f"no simulation {kind!r}{suggest(kind, list(KINDS))}; there are "
            f"{', '.join(KINDS)}"
        )
    # Logs of simulated islands are no news: there are many, and their content is
    # counted.
    setup_logging("ERROR")
    return KINDS[kind][0](arguments[1:])


def replay_command(arguments: Sequence[str]) -> int:
    """Run `diloco replay`; return 1 if a merge has other bits than on the tape.

    Raises ConfigError if there is nothing to compare: see `replay.run`.
    """
    (options,) = parse(
        [ReplayOptions],
        arguments,
        "diloco replay",
        "Repeat a recorded run and compare every merge.",
    )
    # Faults of the recorded run are no news.
    setup_logging("ERROR")
    console = Console(stderr=True, markup=False)
    from diloco_jax.simulation.replay.recording import read_recording

    try:
        with bar("reading the tape") as report:
            recording = read_recording(
                options.workdir,
                options.until,
                options.paths or None,
                trust_code=options.trust_code,
                report=report,
            )
        # This must happen before anything imports jax.
        recording.prepare_environment()
        from diloco_jax.simulation.replay.replay import run

        outcome = run(recording, console, options.save)
    except TapeError as error:
        raise ConfigError(str(error)) from error
    if options.json:
        print(json.dumps(dataclasses.asdict(outcome)))
    print(outcome, file=sys.stderr)
    return EXIT_DONE if outcome.identical else EXIT_FAILED


def goodput_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate goodput`."""
    from diloco_jax.simulation.fleets import goodput

    default = goodput.GoodputConfig()
    config, output = _parse("goodput", arguments, default, SweepOutput())
    if not output.sweep:
        if output.out != SweepOutput.out:
            raise ConfigError(
                f"--out {output.out} without --sweep, which alone writes files; add "
                f"--sweep or leave out --out"
            )
        with bar("goodput") as progress:
            result = goodput.simulate_goodput(config, progress)
        show(output.json, result.json(), result.text())
        return EXIT_DONE
    for field, values in goodput.SWEPT.items():
        if (value := getattr(config, field)) != getattr(default, field):
            raise ConfigError(
                f"--{field} {value} with --sweep, which goes over {field} "
                f"{', '.join(map(str, values))}; leave out one of them"
            )
    require_writable(output.out, "--out")
    points = goodput.points(config, goodput.CHIPS, goodput.ISLANDS)
    results: list[goodput.GoodputResult] = []

    def shown() -> None:
        values = {"points": [result.json() for result in results]}
        show(output.json, values, table(SWEEP_COLUMNS, results))

    try:
        with bar("sweep") as progress:
            # One by one: if it is interrupted, the finished points are there.
            results.extend(goodput.simulated(points, progress))
    except KeyboardInterrupt:
        shown()
        tell(f"{len(results)} of {len(points)} points are done; no file is written")
        raise
    goodput.write_csv(results, output.out / "goodput.csv")
    goodput.write_plot(results, output.out / "goodput.png")
    shown()
    tell(f"written: {output.out}/goodput.csv, goodput.png")
    return EXIT_DONE


def faults_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate faults`."""
    from diloco_jax.simulation.faults import play

    config, output = _parse("faults", arguments, play.FaultsConfig(), Output())
    report = play.FaultsReport()
    try:
        with bar("faults") as progress:
            report = play.check_faults(
                config,
                progress,
                lambda violation: tell(play.violation_text(violation)),
                report,
            )
    except KeyboardInterrupt:
        show(output.json, report.json(), play.text(report))
        raise
    show(output.json, report.json(), play.text(report))
    return EXIT_FAILED if report.violations else EXIT_DONE


# ---- one table, or one text --------------------------------------------------------

SWEEP_COLUMNS: Columns = {
    "way": lambda result: str(result.config.label),
    "chips": lambda result: f"{result.config.chips:,}",
    "compute goodput": lambda result: f"{result.mean.compute_goodput:.1%}",
    "published": lambda result: or_dash(result.published, ".0%"),
    "goodput": lambda result: f"{result.mean.goodput:.1%}",
    "uptime": lambda result: f"{result.mean.uptime:.1%}",
}
MIX_COLUMNS: Columns = {
    "islands wait": lambda row: str(row.name),
    "goodput": lambda row: f"{row.goodput:.1%}",
    "published": lambda row: or_dash(row.published_goodput, ".0%"),
    "participation": lambda row: f"{row.participation:.1%}",
    "merges/h": lambda row: f"{row.merges_per_hour:.0f}",
}
SCAVENGE_COLUMNS: Columns = {
    "extra": lambda row: f"{row.extra:+.0%}",
    "time": lambda row: f"{row.time_ratio:.3f}",
    "published": lambda row: or_dash(row.published_ratio, ".2f"),
    "at best": lambda row: f"{row.best_ratio:.3f}",
    "elastic, published": lambda row: or_dash(row.published_elastic_ratio, ".2f"),
}


def mix_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate mix`."""
    from diloco_jax.simulation.fleets.unequal import MixConfig, simulate_mix

    def shown(config: MixConfig, progress: Progress) -> Shown:
        rows = simulate_mix(config, progress)
        title = (
            f"{config.v6e} v6e islands, {config.v5p} v5p islands with {config.gap:.0%} "
            f"longer steps, spread {config.step_spread:.0%}, {config.hours:g} h"
        )
        caption = (
            "The published 84 % is for K = 8, where every step waits for all islands: "
            "compare the row lockstep. With K = M here no step waits."
        )
        return _listed(config, rows), table(MIX_COLUMNS, rows, title, caption)

    return _command("mix", arguments, MixConfig(), shown)


def scavenge_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate scavenge`."""
    from diloco_jax.simulation.fleets.unequal import ScavengeConfig, simulate_scavenge

    def shown(config: ScavengeConfig, progress: Progress) -> Shown:
        rows = simulate_scavenge(config, progress)
        title = (
            f"{config.islands} islands, and extra ones for {config.tokens_share:.0%} "
            f"of the token budget: training time over that without them"
        )
        caption = (
            "At best: as many tokens at the speed of all islands. Elastic: "
            "data-parallel, which stops to take machines in and to let them go."
        )
        return _listed(config, rows), table(SCAVENGE_COLUMNS, rows, title, caption)

    return _command("scavenge", arguments, ScavengeConfig(), shown)


def bandwidth_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate bandwidth`."""
    from diloco_jax.simulation.fleets.bandwidth import (
        BandwidthConfig,
        simulate_bandwidth,
    )

    def shown(config: BandwidthConfig, progress: Progress) -> Shown:
        result = simulate_bandwidth(config)
        formulas = result.formulas()
        more = {"speedup": result.speedup, "formulas": formulas}
        return {**dataclasses.asdict(result), **more}, "\n".join(formulas)

    return _command("bandwidth", arguments, BandwidthConfig(), shown, waits=False)


KINDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "goodput": (goodput_command, "chip time left by failures; --sweep"),
    "mix": (mix_command, "unequal islands: waiting for all, for one, with grace"),
    "scavenge": (scavenge_command, "extra islands for a part of the token budget"),
    "bandwidth": (bandwidth_command, "rates that links must carry"),
    "faults": (faults_command, "random faults, and invariants that must hold"),
}


def _command(
    kind: str,
    arguments: Sequence[str],
    config: ConfigT,
    shown: Callable[[ConfigT, Progress], Shown],
    *,
    waits: bool = True,
) -> int:
    """Simulate and show what was found. waits: it is worth a bar."""
    config, output = _parse(kind, arguments, config, Output())
    with bar(kind) if waits else contextlib.nullcontext(nobody) as progress:
        values, text = shown(config, progress)
    show(output.json, values, text)
    return EXIT_DONE


def _parse(
    kind: str, arguments: Sequence[str], config: ConfigT, output: OutputT
) -> tuple[ConfigT, OutputT]:
    """Read the fields of `config` and `output` as options."""
    prog = f"diloco simulate {kind}"
    parsed, shown = parse([config, output], arguments, prog, str(type(config).__doc__))
    return parsed, shown


def _listed(config: Any, rows: Sequence[Any]) -> dict[str, Any]:
    """Return dataclasses as JSON-compatible builtins, together with their config."""
    listed = [dataclasses.asdict(row) for row in rows]
    return {"rows": listed, "config": dataclasses.asdict(config)}
