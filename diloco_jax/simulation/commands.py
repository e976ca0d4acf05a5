"""`diloco simulate KIND` and `diloco replay`: options in, text or one JSON object out.

Nothing heavy is imported before a command needs it: replay sets the environment that
jax reads when it is imported.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from diloco_jax.config.fields import setting
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, ConfigError, suggest
from diloco_jax.files import require_writable
from diloco_jax.observability.logs import setup_logging
from diloco_jax.observability.tape import TapeError
from diloco_jax.options import WorkdirOptions, parse
from diloco_jax.simulation.output import Columns, bar, or_dash, part, show, table, tell

ConfigT = TypeVar("ConfigT")
OutputT = TypeVar("OutputT", bound="Output")


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
            for i, point in enumerate(points):
                own = part(progress, i, len(points))
                results.append(goodput.simulate_goodput(point, own))
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
            report = play.check_faults(config, progress, lambda v: tell(str(v)), report)
    except KeyboardInterrupt:
        show(output.json, report.json(), str(report))
        raise
    show(output.json, report.json(), str(report))
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


def bandwidth_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate bandwidth`."""
    from diloco_jax.simulation.fleets import bandwidth

    config, output = _parse(
        "bandwidth", arguments, bandwidth.BandwidthConfig(), Output()
    )
    result = bandwidth.simulate_bandwidth(config)
    formulas = result.formulas()
    more = {"speedup": result.speedup, "formulas": formulas}
    show(output.json, {**dataclasses.asdict(result), **more}, "\n".join(formulas))
    return EXIT_DONE


KINDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "goodput": (goodput_command, "chip time left by failures; --sweep"),
    "bandwidth": (bandwidth_command, "rates that links must carry"),
    "faults": (faults_command, "random faults, and invariants that must hold"),
}


def _parse(
    kind: str, arguments: Sequence[str], config: ConfigT, output: OutputT
) -> tuple[ConfigT, OutputT]:
    """Read the fields of `config` and `output` as options."""
    prog = f"diloco simulate {kind}"
    parsed, shown = parse([config, output], arguments, prog, str(type(config).__doc__))
    return parsed, shown
