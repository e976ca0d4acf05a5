"""`diloco eval WORKDIR`: the loss of a run, for people, programs and its summary."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.exit_codes import EXIT_DONE
from diloco_jax.loading import add_text_option
from diloco_jax.workdir import add_to_summary, read_config


def eval_command(arguments: Sequence[str]) -> int:
    """`diloco eval WORKDIR [--json]`: prints the loss, and adds it to the summary."""
    parser = argparse.ArgumentParser(
        prog="diloco eval",
        description="Loss of a run's newest global parameters on all validation text. "
        "Where the run has ended, it is added to summary.json.",
        allow_abbrev=False,
    )
    parser.add_argument("workdir", type=Path, metavar="WORKDIR")
    add_text_option(parser)
    parser.add_argument("--json", action="store_true", help="one object, on stdout")
    options = parser.parse_args(arguments)
    config = read_config(options.workdir, options.paths)
    from diloco_jax.island.environment import skip_absent_tpu

    # Before anything imports jax.
    skip_absent_tpu()
    from diloco_jax.evaluation import run
    from diloco_jax.observability.logs import setup_logging
    from diloco_jax.observability.report import loss_line

    setup_logging()
    result = run(config, options.workdir)
    add_to_summary(options.workdir, result)
    if options.json:
        print(json.dumps(result))
    else:
        text = (
            f"{loss_line(result)}, after {result['eval_merges']:,} merges and "
            f"{result['eval_tokens']:,} tokens"
        )
        print(text, file=sys.stderr)
    return EXIT_DONE
