"""`diloco eval WORKDIR`: the loss of a run, for people, programs and its summary."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from diloco_jax.exit_codes import EXIT_DONE
from diloco_jax.options import WorkdirOptions, parse
from diloco_jax.workdir import add_to_summary, read_config


def eval_command(arguments: Sequence[str]) -> int:
    """Run `diloco eval WORKDIR [--json]`: print the loss, add it to the summary."""
    (options,) = parse(
        [WorkdirOptions],
        arguments,
        "diloco eval",
        "Loss of a run's newest global parameters on all validation text. It is added "
        "to summary.json if the run has ended.",
    )
    config = read_config(
        options.workdir, options.paths or None, trust_code=options.trust_code
    )
    from diloco_jax.island.environment import fit_threads, skip_absent_tpu

    # Before anything imports jax.
    skip_absent_tpu()
    fit_threads()
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
