"""The commands that take a config, and `diloco eval WORKDIR`: the loss of a run, or its
scores in tasks.

Each reads its config, sets the environment that jax will find, and hands over. Nothing
heavy is imported before that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diloco_jax import before_jax, machine, process, run_files
from diloco_jax.config import Config, loading
from diloco_jax.config.config import require_worth
from diloco_jax.config.fields import NOT_NEGATIVE, setting
from diloco_jax.config.options import (
    ANY_ISLAND,
    COMPLETES,
    HELP,
    TRUST_CODE,
    WorkdirOptions,
    parse,
    parse_with_config,
)
from diloco_jax.errors import EXIT_DONE, ConfigError
from diloco_jax.files import absolute, expand
from diloco_jax.hardware.tpus import generation_here
from diloco_jax.wire.addresses import parse_address, require_loopback, require_tls
from diloco_jax.workdir import (
    add_to_summary,
    holds_run,
    make_workdir,
    read_config,
    read_summary,
    require_folder,
)

if TYPE_CHECKING:
    from rich.console import Console

    from diloco_jax.weights.tasks import TextModel


T = TypeVar("T")
RESUME = "--resume"
TRUSTS = "--trust-code"


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """See `diloco run --help`."""

    baseline: bool = setting(
        False,
        help="Afterwards train the same model plainly on as many tokens, and compare.",
    )
    init: str = setting(
        "",
        metavar="hf:DIR|hf:OWNER/NAME|run:WORKDIR",
        help="Start from weights, whose model is taken over with them: of a folder "
        "with config.json and safetensors, of the hub (OWNER/NAME@REVISION pins one), "
        "or of a run.",
    )
    resume: str = setting(
        "", help="Workdir of a stopped run that should go on; CONFIG may be left out."
    )
    dashboard: bool = setting(
        False, help="Show the run in a browser, too, until it ends: prints the address."
    )
    trust_code: bool = setting(False, help=TRUST_CODE)
    json: bool = setting(
        False, help="Print the summary to standard output as one JSON object."
    )


def run_command(arguments: Sequence[str]) -> int:
    """Run `diloco run CONFIG`: coordinator and all islands on this machine."""
    from diloco_jax.cluster.cluster import island_environment

    # Before anything imports jax: the baseline trains here, on the islands' platform.
    os.environ["JAX_PLATFORMS"] = island_environment()["JAX_PLATFORMS"]
    machine.fit_threads()
    arguments = with_config(arguments)
    path, config, options = _config_and_options("run", arguments, RunOptions())
    require_one_workdir(arguments, config.placement.workdir, options.resume)
    if options.init and options.resume:
        raise ConfigError(
            f"--init {options.init} begins a run, --resume {options.resume} goes on "
            f"with one; leave one of them out"
        )
    config = _started_from(config, options.init, trust_code=options.trust_code)
    from diloco_jax.cluster.run import run

    code, summary = run(
        config,
        path,
        _console(),
        baseline=options.baseline,
        resume=options.resume,
        dashboard=options.dashboard,
    )
    if options.json:
        print(json.dumps(summary))
    return code


def with_config(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `diloco run` with a CONFIG: if `--resume WORKDIR` comes
    without one, add the config.json of that workdir."""
    arguments = list(arguments)
    if not arguments or arguments[0].split("=")[0] != RESUME:
        return arguments
    _, equals, value = arguments[0].partition("=")
    if not equals:
        value = arguments[1] if len(arguments) > 1 else ""
    if not value or value.startswith("-"):
        raise ConfigError(f"{RESUME} takes the workdir of the run that is to go on")
    workdir = expand(value)
    require_folder(workdir)
    if not holds_run(workdir):
        raise ConfigError(
            f"{RESUME} {value}: no run is there (there is no run.json); give the "
            f"workdir of a run, or begin one with diloco run CONFIG"
        )
    # Before the config is read: a config of another format may have other fields.
    read_config(workdir, trust_code=TRUSTS in arguments)
    return [str(workdir / run_files.CONFIG), *arguments]


def require_one_workdir(arguments: Sequence[str], workdir: str, resume: str) -> None:
    """Raise ConfigError if the command line gives both a workdir and another one to
    resume. The workdir in a config file only says where its runs begin."""
    options = {argument.split("=")[0] for argument in arguments}
    if not resume or options.isdisjoint(("--workdir", "--placement.workdir")):
        return
    if Path(absolute(workdir)).resolve() != Path(absolute(resume)).resolve():
        raise ConfigError(
            f"--workdir {workdir} with {RESUME} {resume}: a run goes on in its own "
            f"workdir; leave --workdir out"
        )


def chaos_command(arguments: Sequence[str]) -> int:
    """Run `diloco chaos CONFIG or WORKDIR`: a local run whose processes and links are
    struck; that of a workdir goes on already."""
    from diloco_jax.chaos.schedule import ChaosOptions

    console = _console()
    if arguments and Path(arguments[0]).is_dir():
        from diloco_jax.chaos.command import strike_running

        about = "Strike a run of this machine that goes on, from now on."
        workdir = Path(absolute(arguments[0]))
        (options,) = parse(
            [ChaosOptions], arguments[1:], f"diloco chaos {arguments[0]}", about
        )
        code, findings = strike_running(workdir, console, options)
    else:
        path, config, options = _config_and_options("chaos", arguments, ChaosOptions())
        from diloco_jax.chaos.command import run

        code, findings = run(config, path, console, options)
    if options.json:
        print(json.dumps(findings))
    return code


def coordinator_command(arguments: Sequence[str]) -> int:
    """Run `diloco coordinator CONFIG --workdir DIR --bind HOST:PORT`."""
    from diloco_jax.coordinator.going_on import DRAWN, CoordinatorOptions, with_source

    _, config, options = _config_and_options(
        "coordinator", with_source(arguments), CoordinatorOptions()
    )
    config = _started_from(
        config, options.init.removeprefix(DRAWN), trust_code=options.trust_code
    )
    workdir = _workdir(config)
    # Before anything imports jax.
    machine.fit_threads()
    before_jax.require_flags()
    with process.gc_pause():
        from diloco_jax.config.resolving import resolve
        from diloco_jax.coordinator import going_on
        from diloco_jax.coordinator.main import run

    process.setup_logging()
    options.check_run()
    if options.run_id:
        going_on.require_run(workdir, options.run_id)
    if options.init:
        require_worth(config.run)
    else:
        config = going_on.with_beginning_of(config, workdir)
    config = resolve(config, copied=True)
    code: int = run(
        config,
        workdir,
        init=bool(options.init),
        resume=options.resume,
        gathers=options.run_id,
        trusted=options.trust,
    )
    return code


def worker_command(arguments: Sequence[str]) -> int:
    """Run `diloco worker CONFIG --index N --workdir DIR`."""
    from diloco_jax.coordinator.going_on import WorkerOptions

    _, config, options = _config_and_options("worker", arguments, WorkerOptions())
    bind, workdir = options.address(config.placement), _workdir(config)
    # Before anything imports jax.
    machine.fit_threads()
    before_jax.require_flags()
    with process.gc_pause():
        from diloco_jax.coordinator.worker import run

    process.setup_logging()
    code: int = run(config, options.index, workdir, bind)
    return code


@dataclasses.dataclass(frozen=True)
class IslandOptions:
    """The options of `diloco island`."""

    name: str = setting("", help="The island's name in the config.")
    coordinator: str = setting("", help="HOST:PORT of the coordinator.")
    incarnation: int = setting(
        0,
        help="Number of this attempt, higher than any before; 0 = counted in WORKDIR.",
    )
    world: str = setting(
        "",
        help="HOST:PORT where the island's hosts meet; empty = found by jax (TPU "
        "slices).",
    )
    host_index: int = setting(0, help="Which host of the island this is, with --world.")
    cache: str = setting(
        "",
        help="Folder, or gs://BUCKET/FOLDER, of compiled programs that the islands of "
        "one owner share: each runs what any of them put there. Empty = one for this "
        "island, beside its checkpoints or in WORKDIR.",
    )
    serve: str = setting(
        "",
        help="HOST:PORT at which this host gives publishes to other islands of its "
        "region; empty = any free port of the address from which it reaches the "
        "coordinator.",
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError, naming the option, for values that the config rules
        out.
        """
        for field in ("name", "coordinator"):
            if not getattr(self, field):
                raise ConfigError(f"--{field} is missing; see diloco island --help")
        parse_address(self.coordinator, "--coordinator")
        if self.incarnation < 0:
            raise ConfigError(
                f"--incarnation {self.incarnation}: attempts are counted from 1; leave "
                f"it out to have them counted in WORKDIR"
            )
        hosts = config.island(self.name).hosts
        if not 0 <= self.host_index < hosts:
            raise ConfigError(
                f"--host-index {self.host_index}, but island {self.name!r} has hosts = "
                f"{hosts}; give each of them one from 0 to {hosts - 1}"
            )
        if self.world and hosts == 1:
            raise ConfigError(
                f"--world {self.world}, but island {self.name!r} has hosts = 1; leave "
                f"it out, or set islands.{self.name}.hosts"
            )
        for field in ("world", "serve"):
            if address := getattr(self, field):
                parse_address(address, f"--{field}")
        if self.serve and self.name not in config.regions():
            raise ConfigError(
                f"--serve {self.serve}, but island {self.name!r} is in no region with "
                f"others: leave it out, or set islands.{self.name}.region"
            )


def island_command(arguments: Sequence[str]) -> int:
    """Run `diloco island CONFIG --name NAME --coordinator HOST:PORT --workdir DIR`."""
    _, config, options = _config_and_options("island", arguments, IslandOptions())
    workdir = _workdir(config)
    options.check(config)
    require_loopback(options.coordinator)
    certificates, insecure = config.placement.certificates, config.placement.insecure
    require_tls(options.coordinator, tls=bool(certificates), insecure=insecure)
    # Before anything imports jax, or starts a thread.
    machine.one_arena()
    before_jax.prepare_island(config.island(options.name))
    with process.gc_pause():
        from diloco_jax.config.resolving import resolve
        from diloco_jax.island.main import run, with_model_of_run
        from diloco_jax.island.world import WorldAddress

    incarnation = options.incarnation
    if not incarnation:
        from diloco_jax.cluster.processes import next_attempt

        make_workdir(workdir)
        incarnation = next_attempt(workdir / run_files.ATTEMPTS, options.name)
    process.setup_logging()
    config = with_model_of_run(config, options.name, options.coordinator)
    code: int = run(
        resolve(config, copied=True),
        options.name,
        options.coordinator,
        workdir,
        incarnation,
        WorldAddress(address=options.world, index=options.host_index),
        absolute(options.cache),
        options.serve,
    )
    return code


def emulate_command(arguments: Sequence[str]) -> int:
    """Run `diloco emulate CONFIG`: all islands in this process, in virtual time."""
    from diloco_jax.simulation.emulation_options import CommandOptions

    path, config, options = _config_and_options("emulate", arguments, CommandOptions())
    # Before anything imports jax.
    before_jax.skip_absent_tpu()
    devices = max(island.devices for island in config.islands.values())
    before_jax.prepare_environment(devices)
    before_jax.set_libtpu_flags(generation_here(), os.environ)
    from diloco_jax.simulation.emulate import run

    config = _started_from(config, options.init, trust_code=options.trust_code)
    summary = run(config, path, _console(), options)
    if options.json:
        print(json.dumps(summary))
    return 0


def fork_command(arguments: Sequence[str]) -> int:
    """Run `diloco fork WORKDIR --at MERGE`: a recorded run up to that merge, and on
    under other settings in virtual time."""
    # Before anything imports jax.
    before_jax.skip_absent_tpu()
    from diloco_jax.simulation import fork

    trust = "--trust-code" in arguments
    path, config, options = _config_and_options(
        "fork",
        arguments,
        fork.ForkOptions(),
        ("WORKDIR", lambda path: fork.as_recorded(Path(path), trust_code=trust)),
    )
    # Faults of the recorded run are no news.
    process.setup_logging("ERROR")
    recorded = fork.as_recorded(Path(path), trust_code=trust)
    code, result = fork.run(Path(absolute(path)), recorded, config, options)
    if options.json:
        print(json.dumps(result))
    return code


def launch_command(arguments: Sequence[str]) -> int:
    """Run `diloco launch CONFIG --on tpu_vm|gke|sky`."""
    from diloco_jax.launch.command import LaunchOptions, run

    path, config, options = _config_and_options("launch", arguments, LaunchOptions())
    return run(config, path, options)


def rehearse_command(arguments: Sequence[str]) -> int:
    """Run `diloco rehearse CONFIG`."""
    from diloco_jax.launch.command import RehearseOptions

    given = RehearseOptions()
    path, config, options = _config_and_options("rehearse", arguments, given)
    # It imports jax, which no help needs.
    from diloco_jax.launch.rehearse import run

    return run(config, path, options, _console())


def plan_command(arguments: Sequence[str]) -> int:
    """Run `diloco plan CONFIG`."""
    from diloco_jax.planning.options import PlanOptions

    path, config, options = _config_and_options("plan", arguments, PlanOptions())
    # It imports jax, which no help needs.
    from diloco_jax.planning.command import run

    return run(config, path, options)


def _config_and_options(
    command: str,
    arguments: Sequence[str],
    options: T,
    source: tuple[str, Callable[[str], Config]] | None = None,
) -> tuple[str, Config, T]:
    """Read CONFIG, the first argument, and the options; help needs no CONFIG. source:
    what stands in its place, and what reads it."""
    what, read = source or ("CONFIG", loading.read_config)
    prog = f"diloco {command} {what}"
    launches = command in ("launch", "rehearse")
    if arguments and arguments[0] in (*HELP, COMPLETES):
        shown = Config(islands=ANY_ISLAND)
        parse_with_config(shown, arguments, options, prog, launches=launches)
    if not arguments or arguments[0].startswith("-"):
        remedy = (
            f"the path to a .py file or to a run's config.json, or one of the names "
            f"{', '.join(loading.named_configs())}"
        )
        raise ConfigError(
            f"{what} comes first: {prog} [options]"
            f"{f'; found {arguments[0]!r}' if arguments else ''}; give "
            f"{'the workdir of a run' if source else remedy}"
        )
    path = arguments[0]
    config, parsed = parse_with_config(
        read(path),
        arguments[1:],
        options,
        f"diloco {command} {path}",
        launches=launches,
    )
    return path, config, parsed


def _started_from(config: Config, source: str, *, trust_code: bool = False) -> Config:
    """Return the config of a run that starts from these weights, if there are any."""
    if not source:
        return config
    from diloco_jax.weights.first import started_from

    return started_from(config, source, trust_code=trust_code).validate()


def _console() -> Console:
    """Return where people are told; no help needs it."""
    from rich.console import Console

    return Console(stderr=True, markup=False)


def _workdir(config: Config) -> Path:
    if not config.placement.workdir:
        raise ConfigError("--workdir is missing; give the folder of this run")
    return Path(absolute(config.placement.workdir))


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
    config = read_config(
        options.workdir, options.paths or None, trust_code=options.trust_code
    )
    # Before anything imports jax.
    before_jax.skip_absent_tpu()
    machine.fit_threads()
    process.setup_logging()
    if options.tasks and options.lm_eval:
        raise ConfigError("--tasks and --lm-eval are both given; give one at a time")
    tasks = _eval_tasks if options.tasks else _eval_loss
    evaluate = _eval_lm_eval if options.lm_eval else tasks
    ended = read_summary(options.workdir).get("merges")
    result, text = evaluate(options, config, _console())
    if options.cycle:
        result["eval_cycle"] = options.cycle
    if options.json:
        print(json.dumps(result), flush=True)
    else:
        print(text, file=sys.stderr)
    # If the run ended or went on meanwhile, its newest parameters are others.
    if not options.cycle and read_summary(options.workdir).get("merges") == ended:
        add_to_summary(options.workdir, result)  # A disk may be full, or read-only.
    return EXIT_DONE


Result = tuple[dict[str, Any], str]
"""A result for programs, and for people."""


def _eval_loss(options: EvalOptions, config: Config, console: Console) -> Result:
    """Return the loss."""
    from diloco_jax.evaluation import run
    from diloco_jax.observability.terminal import bar, loss_line

    with (
        bar(console, "evaluating") as report,
        bar(console, "reading the parameters") as reading,
    ):
        result = run(config, options.workdir, options.cycle or None, report, reading)
    return result, (
        f"{loss_line(result)}, after {result['eval_merges']:,} merges and "
        f"{result['eval_tokens']:,} tokens"
    )


def _eval_tasks(options: EvalOptions, config: Config, console: Console) -> Result:
    """Return the scores in tasks of multiple choice."""
    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.tasks import read_task, score

    tasks = [read_task(path) for path in options.tasks]
    names = [task.name for task in tasks]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"--tasks has two files of the name {sorted(doubled)[0]!r}, by which the "
            f"scores are told apart; rename one"
        )
    text_model, length = _eval_model(options, console), config.run.sequence_length
    scores = {}
    for task in tasks:
        with bar(console, task.name) as report:
            scores[task.name] = score(text_model, task, length, report=report)
    lines = [_eval_line(name, found) for name, found in scores.items()]
    return {"eval_tasks": scores}, "\n".join(lines)


def _eval_lm_eval(options: EvalOptions, config: Config, console: Console) -> Result:
    """Return what lm-eval finds."""
    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.tasks import scores

    text_model, length = _eval_model(options, console), config.run.sequence_length
    limit = options.limit or None
    with bar(console, "lm-eval") as report:
        found = scores(text_model, options.lm_eval, length, limit=limit, report=report)
    lines = [
        f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in results.items())
        for name, results in found.items()
    ]
    return {"eval_lm_eval": found}, "\n".join(lines)


def _eval_model(options: EvalOptions, console: Console) -> TextModel:
    """Return the run's model."""
    from diloco_jax.observability.terminal import bar
    from diloco_jax.weights.tasks import open_model

    with bar(console, "reading the parameters") as report:
        return open_model(
            options.workdir,
            cycle=options.cycle or None,
            trust_code=options.trust_code,
            report=report,
        )


def _eval_line(name: str, found: dict[str, Any]) -> str:
    shares = []
    for share, title in (("accuracy", "right"), ("accuracy_per_byte", "per byte")):
        error = found[f"{share}_error"]
        within = "" if error is None else f" (standard error {error:.1%})"
        shares.append(f"{title} {found[share]:.1%}{within}")
    cut = f"; {found['cut']} questions were cut" if found["cut"] else ""
    return f"{name}: {', '.join(shares)} of {found['items']:,} items{cut}"
