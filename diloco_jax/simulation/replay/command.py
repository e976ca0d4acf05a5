"""`diloco replay WORKDIR`: options in, an outcome for people, or one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config import ConfigError
from diloco_jax.exit_codes import EXIT_DONE, EXIT_FAILED
from diloco_jax.loading import add_text_option
from diloco_jax.observability.logs import setup_logging
from diloco_jax.observability.tape import TapeError
from diloco_jax.simulation.replay.tape import read_recording


def replay_command(arguments: Sequence[str]) -> int:
    """Returns 1 if a merge has other bits than the tape says.

    Raises ConfigError if there is nothing to compare: see `replay.run`.
    """
    options = _parser().parse_args(arguments)
    # What went wrong in the run is no news.
    setup_logging("ERROR")
    try:
        recording = read_recording(options.workdir, options.until, options.paths)
        # Before anything imports jax.
        recording.prepare_environment()
        from rich.console import Console

        from diloco_jax.simulation.replay.replay import run

        outcome = run(recording, Console(stderr=True, markup=False), options.save)
    except TapeError as error:
        raise ConfigError(str(error)) from error
    if options.json:
        print(json.dumps(dataclasses.asdict(outcome)))
    print(outcome, file=sys.stderr)
    return EXIT_DONE if outcome.identical else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diloco replay",
        description="Repeats a recorded run and compares every merge.",
        allow_abbrev=False,
    )
    parser.add_argument("workdir", type=Path, metavar="WORKDIR")
    parser.add_argument(
        "--until", type=int, metavar="MERGE", help="the last merge to repeat, from 1"
    )
    add_text_option(parser)
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="new folder for the global parameters then; `diloco eval DIR` reads it",
    )
    parser.add_argument("--json", action="store_true", help="one object, on stdout")
    return parser
