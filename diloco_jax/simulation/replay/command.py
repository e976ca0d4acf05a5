"""`diloco replay WORKDIR`: options in, text for people or one JSON object out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from diloco_jax.config import ConfigError
from diloco_jax.config.fields import setting
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.observability.logs import setup_logging
from diloco_jax.observability.tape import TapeError
from diloco_jax.observability.terminal import bar
from diloco_jax.options import WorkdirOptions, parse
from diloco_jax.simulation.replay.recording import read_recording


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
    try:
        with bar(console, "reading the tape") as report:
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
