"""`diloco eval WORKDIR`: the loss of a run, or its scores in tasks."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_jax.config.fields import NOT_NEGATIVE, setting
from diloco_jax.errors import ConfigError
from diloco_jax.exit_codes import EXIT_DONE
from diloco_jax.options import WorkdirOptions, parse
from diloco_jax.workdir import add_to_summary, read_config

if TYPE_CHECKING:
    from diloco_jax.weights.speaker import Speaker


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions(WorkdirOptions):
    """The options of `diloco eval`."""

    cycle: int = setting(
        0,
        NOT_NEGATIVE,
        help="Kept cycle whose parameters are evaluated; 0 = the newest snapshot.",
    )
    tasks: tuple[Path, ...] = setting(
        (),
        help="JSON files of multiple-choice items, whose scores are shown instead of "
        "the loss (docs/weights.md).",
    )
    lm_eval: tuple[str, ...] = setting(
        (),
        help="Tasks of lm-eval, by name or as YAML files, whose results are shown "
        "instead of the loss (docs/weights.md).",
    )
    limit: int = setting(
        0, NOT_NEGATIVE, help="Most items of a task of lm-eval; 0 = all."
    )


def eval_command(arguments: Sequence[str]) -> int:
    """Run `diloco eval WORKDIR [--json]`: print the loss, or the scores in tasks; those
    of the newest parameters are added to the summary."""
    (options,) = parse(
        [EvalOptions],
        arguments,
        "diloco eval",
        "Loss of a run's global parameters on all validation text, or their scores in "
        "tasks. Those of the newest ones are added to summary.json if the run has "
        "ended.",
    )
    for option, given in (("--tasks", options.tasks), ("--lm-eval", options.lm_eval)):
        if option in arguments and not given:
            raise ConfigError(f"{option} names nothing; give at least one after it")
    read_config(options.workdir, options.paths or None, trust_code=options.trust_code)
    from diloco_jax.before_jax import skip_absent_tpu
    from diloco_jax.machine import fit_threads

    # Before anything imports jax.
    skip_absent_tpu()
    fit_threads()
    from diloco_jax.observability.logs import setup_logging

    setup_logging()
    if options.tasks and options.lm_eval:
        raise ConfigError("--tasks and --lm-eval are both given; give one at a time")
    if options.lm_eval:
        result, text = _of_lm_eval(options)
    else:
        result, text = _scores(options) if options.tasks else _loss(options)
    if options.cycle:
        result["eval_cycle"] = options.cycle
    else:
        add_to_summary(options.workdir, result)
    if options.json:
        print(json.dumps(result))
    else:
        print(text, file=sys.stderr)
    return EXIT_DONE


def _loss(options: EvalOptions) -> tuple[dict[str, Any], str]:
    """Return the loss for programs and for people."""
    from rich.console import Console

    from diloco_jax.evaluation import run
    from diloco_jax.observability.terminal import bar, loss_line

    config = read_config(
        options.workdir, options.paths or None, trust_code=options.trust_code
    )
    console, cycle = Console(stderr=True), options.cycle or None
    with (
        bar(console, "evaluating") as report,
        bar(console, "reading the parameters") as reading,
    ):
        result = run(config, options.workdir, cycle, report, reading)
    return result, (
        f"{loss_line(result)}, after {result['eval_merges']:,} merges and "
        f"{result['eval_tokens']:,} tokens"
    )


def _scores(options: EvalOptions) -> tuple[dict[str, Any], str]:
    """Return the scores for programs and for people."""
    from rich.console import Console

    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.tasks import read_task, score

    tasks = [read_task(path) for path in options.tasks]
    names = [task.name for task in tasks]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"--tasks has two files of the name {sorted(doubled)[0]!r}, by which the "
            f"scores are told apart; rename one"
        )
    speaker, length = _speaker(options)
    console, scores = Console(stderr=True), {}
    for task in tasks:
        with bar(console, task.name) as report:
            scores[task.name] = score(speaker, task, length, report=report)
    lines = [_line(name, found) for name, found in scores.items()]
    return {"eval_tasks": scores}, "\n".join(lines)


def _of_lm_eval(options: EvalOptions) -> tuple[dict[str, Any], str]:
    """Return what lm-eval finds, for programs and for people."""
    from rich.console import Console

    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights import harness

    speaker, length = _speaker(options)
    with bar(Console(stderr=True), "lm-eval") as report:
        found = harness.scores(
            speaker,
            options.lm_eval,
            length,
            limit=options.limit or None,
            report=report,
        )
    lines = [
        f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in results.items())
        for name, results in found.items()
    ]
    return {"eval_lm_eval": found}, "\n".join(lines)


def _speaker(options: EvalOptions) -> tuple[Speaker, int]:
    """Return the run's model, and the length of the rows that it was trained on."""
    from rich.console import Console

    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.speaker import open_speaker

    config = read_config(options.workdir, trust_code=options.trust_code)
    with bar(Console(stderr=True), "reading the parameters") as report:
        speaker = open_speaker(
            options.workdir,
            cycle=options.cycle or None,
            trust_code=options.trust_code,
            report=report,
        )
    return speaker, config.run.sequence_length


def _line(name: str, found: dict[str, Any]) -> str:
    shares = []
    for share, title in (("accuracy", "right"), ("accuracy_per_byte", "per byte")):
        error = found[f"{share}_error"]
        within = "" if error is None else f" (standard error {error:.1%})"
        shares.append(f"{title} {found[share]:.1%}{within}")
    cut = f"; {found['cut']} questions were cut" if found["cut"] else ""
    return f"{name}: {', '.join(shares)} of {found['items']:,} items{cut}"
