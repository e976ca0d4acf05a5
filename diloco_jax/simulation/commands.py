"""`diloco simulate KIND` and `diloco replay`: options in, text or one JSON object out.

Nothing heavy is imported before a command needs it: replay sets the environment that
jax reads when it is imported.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_jax import before_jax
from diloco_jax.config.fields import setting
from diloco_jax.config.options import WorkdirOptions, paragraph, parse
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED, ConfigError, suggest
from diloco_jax.observability.tape import TapeError
from diloco_jax.observability.terminal import bar
from diloco_jax.process import setup_logging


@dataclasses.dataclass(frozen=True)
class Output:
    """Options of the output."""

    json: bool = setting(False, help="Print one JSON object to standard output.")


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
    before_jax.skip_absent_tpu()
    console = Console(stderr=True, markup=False)
    from diloco_jax.simulation.replay.recording import read_recording

    try:
        with _bar("reading the tape") as report:
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
    from diloco_jax.simulation import goodput

    config, output = _parse("goodput", arguments, goodput.GoodputConfig(), Output())
    with _bar("goodput") as progress:
        result = goodput.simulate_goodput(config, progress)
    _show(output.json, result.json(), result.text())
    return EXIT_DONE


def faults_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate faults`."""
    from diloco_jax.simulation.faults import play

    config, output = _parse("faults", arguments, play.FaultsConfig(), Output())
    report = play.FaultsReport()
    try:
        with _bar("faults") as progress:
            play.check(config.given(), progress, lambda v: _tell(str(v)), report)
    except KeyboardInterrupt:
        _show(output.json, report.json(), str(report))
        raise
    _show(output.json, report.json(), str(report))
    return EXIT_FAILED if report.violations else EXIT_DONE


def bandwidth_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate bandwidth`."""
    from diloco_jax.simulation import bandwidth

    default = bandwidth.BandwidthConfig()
    config, output = _parse("bandwidth", arguments, default, Output())
    result = bandwidth.simulate_bandwidth(config)
    formulas = result.formulas()
    more = {"speedup": result.speedup, "formulas": formulas}
    _show(output.json, {**dataclasses.asdict(result), **more}, "\n".join(formulas))
    return EXIT_DONE


KINDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "goodput": (goodput_command, "chip time left by failures"),
    "bandwidth": (bandwidth_command, "rates that links must carry"),
    "faults": (faults_command, "random faults, and invariants that must hold"),
}


def _parse(kind: str, arguments: Sequence[str], *given: Any) -> Any:
    """Read the fields of a config and of `Output` as options."""
    about = paragraph(type(given[0]).__doc__)
    return parse(given, arguments, f"diloco simulate {kind}", about)


def _bar(title: str) -> AbstractContextManager[Callable[[float], None]]:
    """Show how far a simulation is, on standard error."""
    return bar(Console(stderr=True), title)


def _show(as_json: bool, values: dict[str, Any], text: str) -> None:
    """Print the values as JSON to standard output, or the text for people."""
    if as_json:
        print(json.dumps(values))
    else:
        _tell(text)


def _tell(text: str) -> None:
    """Print to standard error."""
    console = Console(stderr=True, markup=False)
    console.print(text, highlight=False, soft_wrap=True)
