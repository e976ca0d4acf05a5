"""The `diloco` command.

Exit codes: 0 done, 2 bad arguments or config, 3 refused by the peer, 1 anything else.
Results for programs go to standard output (`--json`), all else to standard error.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.errors import ConfigError, disk_failure, suggest
from diloco_jax.exit_codes import EXIT_CONFIG, EXIT_FAILED, EXIT_REFUSED
from diloco_jax.interrupt import Interruptible
from diloco_jax.paths import absolute

T = TypeVar("T")

MEMBERS = ("coordinator", "island")
"""Commands that leave a run in order when asked to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"diloco {metadata.version('diloco-jax')}")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        return _fail(
            f"no command {name!r}{suggest(name, list(COMMANDS))}; there are {known}",
            EXIT_CONFIG,
        )
    with contextlib.nullcontext() if name in MEMBERS else Interruptible():
        return _run(name, arguments[1:])


def _run(name: str, arguments: Sequence[str]) -> int:
    from diloco_jax.cluster.cluster import ClusterError
    from diloco_jax.paths import StorageAway
    from diloco_jax.wire.errors import Refused, SecurityError, WireError

    try:
        code = COMMANDS[name][0](arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # `head` does this. Python flushes again as it ends, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail("standard output was closed", EXIT_FAILED)
    except (ConfigError, SecurityError) as error:
        return _fail(str(error), EXIT_CONFIG)
    except Refused as error:
        return _fail(str(error), EXIT_REFUSED)
    except ClusterError as error:
        return _fail(str(error), error.exit_code)
    except (WireError, StorageAway) as error:
        return _fail(str(error), EXIT_FAILED)
    except OSError as error:
        message = disk_failure(error, after=_goes_on(name))
        if not message:
            raise
        return _fail(message, EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_FAILED)


# ---- commands that take a config ------------------------------------------------


def run_command(arguments: Sequence[str]) -> int:
    """Run `diloco run CONFIG`: coordinator and all islands on this machine."""
    from diloco_jax.cluster.commands import island_environment

    # Before anything imports jax: the baseline trains here, on the islands' platform.
    os.environ["JAX_PLATFORMS"] = island_environment()["JAX_PLATFORMS"]
    from diloco_jax.island.environment import fit_threads

    fit_threads()
    from diloco_jax.cluster.options import RunOptions
    from diloco_jax.cluster.resume import require_one_workdir, with_config

    arguments = with_config(arguments)
    path, config, options = _config_and_options("run", arguments, RunOptions())
    require_one_workdir(arguments, config.placement.workdir, options.resume)
    if options.init and options.resume:
        raise ConfigError(
            f"--init {options.init} begins a run, --resume {options.resume} goes on "
            f"with one; leave one of them out"
        )
    config = _started_from(config, options.init, trust_code=options.trust_code)
    from rich.console import Console

    from diloco_jax.cluster.run import run

    code, summary = run(
        config,
        path,
        Console(stderr=True, markup=False),
        baseline=options.baseline,
        resume=options.resume,
    )
    if options.json:
        print(json.dumps(summary))
    return code


def coordinator_command(arguments: Sequence[str]) -> int:
    """Run `diloco coordinator CONFIG --workdir DIR --bind HOST:PORT`."""
    from diloco_jax.coordinator.options import (
        DRAWN,
        CoordinatorOptions,
        with_source,
    )

    _, config, options = _config_and_options(
        "coordinator", with_source(arguments), CoordinatorOptions()
    )
    config = _started_from(
        config, options.init.removeprefix(DRAWN), trust_code=options.trust_code
    )
    workdir = _workdir(config)
    from diloco_jax.island.environment import fit_threads

    # Before anything imports jax.
    fit_threads()
    from diloco_jax.config.resolving import resolve
    from diloco_jax.coordinator import going_on
    from diloco_jax.coordinator.main import run
    from diloco_jax.observability.logs import setup_logging

    setup_logging()
    if not options.init:
        config = going_on.with_model_of_workdir(config, workdir)
    config = resolve(config, copied=True)
    code: int = run(config, workdir, init=bool(options.init), resume=options.resume)
    return code


def island_command(arguments: Sequence[str]) -> int:
    """Run `diloco island CONFIG --name NAME --coordinator HOST:PORT --workdir DIR`."""
    from diloco_jax.island.options import IslandOptions

    _, config, options = _config_and_options("island", arguments, IslandOptions())
    workdir = _workdir(config)
    options.check(config)
    from diloco_jax.island.environment import prepare_island

    # Before anything imports jax.
    prepare_island(config.island(options.name))
    incarnation = options.incarnation
    if not incarnation:
        from diloco_jax.cluster.attempts import next_attempt
        from diloco_jax.workdir import make_workdir

        make_workdir(workdir)
        incarnation = next_attempt(workdir / run_files.ATTEMPTS, options.name)
    from diloco_jax.config.resolving import resolve
    from diloco_jax.island.hosts.meeting import WorldAddress
    from diloco_jax.island.main import run
    from diloco_jax.island.of_run import with_model_of_run
    from diloco_jax.observability.logs import setup_logging

    setup_logging()
    config = with_model_of_run(config, options.name, options.coordinator)
    code: int = run(
        resolve(config, copied=True),
        options.name,
        options.coordinator,
        workdir,
        incarnation,
        WorldAddress(address=options.world, index=options.host_index),
    )
    return code


def emulate_command(arguments: Sequence[str]) -> int:
    """Run `diloco emulate CONFIG`: all islands in this process, in virtual time."""
    from diloco_jax.simulation.emulation.options import CommandOptions

    path, config, options = _config_and_options("emulate", arguments, CommandOptions())
    from diloco_jax.island.environment import (
        generation_here,
        prepare_environment,
        skip_absent_tpu,
    )
    from diloco_jax.libtpu import set_flags

    # Before anything imports jax.
    skip_absent_tpu()
    prepare_environment(max(island.devices for island in config.islands.values()))
    set_flags(generation_here(), os.environ)
    from rich.console import Console

    from diloco_jax.simulation.emulation.emulate import run

    config = _started_from(config, options.init, trust_code=options.trust_code)
    summary = run(config, path, Console(stderr=True, markup=False), options)
    if options.json:
        print(json.dumps(summary))
    return 0


def launch_command(arguments: Sequence[str]) -> int:
    """Run `diloco launch CONFIG --on tpu_vm|gke`."""
    from diloco_jax.launch.command import LaunchOptions, run

    path, config, options = _config_and_options("launch", arguments, LaunchOptions())
    return run(config, path, options)


def plan_command(arguments: Sequence[str]) -> int:
    """Run `diloco plan CONFIG`."""
    from diloco_jax.planning.command import run
    from diloco_jax.planning.options import PlanOptions

    path, config, options = _config_and_options("plan", arguments, PlanOptions())
    return run(config, path, options)


def _config_and_options(
    command: str, arguments: Sequence[str], options: T
) -> tuple[str, Config, T]:
    """Read CONFIG, the first argument, and the options; help needs no CONFIG."""
    from diloco_jax.config.loading import read_config
    from diloco_jax.options import ANY_ISLAND, parse_with_config

    prog, launches = f"diloco {command} CONFIG", command == "launch"
    if arguments and arguments[0] in ("-h", "--help"):
        shown = Config(islands=ANY_ISLAND)
        parse_with_config(shown, ["--help"], options, prog, launches=launches)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"CONFIG comes first: {prog} [options], with the path to a configs/*.py"
            f"{f'; found {arguments[0]!r}' if arguments else ''}"
        )
    path = arguments[0]
    config, parsed = parse_with_config(
        read_config(path),
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


def _workdir(config: Config) -> Path:
    if not config.placement.workdir:
        raise ConfigError("--workdir is missing; give the folder of this run")
    return Path(absolute(config.placement.workdir))


# ---- commands that take no config ------------------------------------------------


def replay_command(arguments: Sequence[str]) -> int:
    """Run `diloco replay WORKDIR [--until MERGE] [--json]`."""
    from diloco_jax.island.environment import skip_absent_tpu

    # Before anything imports jax.
    skip_absent_tpu()
    from diloco_jax.simulation.replay import command as replay_command

    return replay_command.replay_command(arguments)


def _of(module: str, function: str) -> Callable[[Sequence[str]], int]:
    """Return a command whose module is imported when it runs."""

    def command(arguments: Sequence[str]) -> int:
        code: int = getattr(importlib.import_module(module), function)(arguments)
        return code

    return command


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str, str]] = {
    "run": (
        run_command,
        "CONFIG [--workdir DIR] [--init hf:DIR] [--resume WORKDIR] [options]",
        "coordinator and all islands of CONFIG on this machine",
    ),
    "coordinator": (
        coordinator_command,
        "CONFIG --workdir DIR --bind HOST:PORT",
        "the coordinator alone; --init [hf:DIR] begins a new run",
    ),
    "island": (
        island_command,
        "CONFIG --name NAME --coordinator HOST:PORT --workdir DIR",
        "one island",
    ),
    "emulate": (
        emulate_command,
        "CONFIG [--workdir DIR] [--json] [options]",
        "all islands with real gradients in this process, in virtual time",
    ),
    "status": (
        _of("diloco_jax.cluster.status_command", "status_command"),
        "HOST:PORT or WORKDIR [--json]",
        "who is alive, who takes part, versions, tokens, goodput, bandwidth",
    ),
    "eval": (
        _of("diloco_jax.eval_command", "eval_command"),
        "WORKDIR [--json]",
        "loss on the whole validation split",
    ),
    "export": (
        _of("diloco_jax.weights.export_command", "export_command"),
        "WORKDIR DIR [--dtype bfloat16]",
        "the parameters as safetensors and config.json, for other tools",
    ),
    "generate": (
        _of("diloco_jax.weights.generate_command", "generate_command"),
        "RUN_OR_EXPORT --prompt TEXT [--max-tokens N] [--temperature T] [--top-p P]",
        "continues a text",
    ),
    "simulate": (
        _of("diloco_jax.simulation.commands", "simulate_command"),
        "goodput|mix|scavenge|bandwidth|faults|calibrate [options] [--json]",
        "virtual time: what fleets would do",
    ),
    "replay": (
        replay_command,
        "WORKDIR [--until MERGE] [--json]",
        "repeats a recorded run from its tape and compares every merge",
    ),
    "plan": (
        plan_command,
        "CONFIG [--json] [options]",
        "compiles CONFIG for its TPU slices without one: fit, speed, bandwidth",
    ),
    "launch": (
        launch_command,
        "CONFIG --on tpu_vm|gke [--action create|run|logs|stop|delete] [--dry-run]",
        "makes and starts what runs CONFIG on TPU slices",
    ),
    "data": (
        _of("diloco_jax.data.prepare.command", "data_command"),
        "prepare OUT SOURCES... [--tokenizer PATH] [--sequence-length T]",
        "packed rows of tokens out of text, JSON lines and Parquet",
    ),
    "manifest": (
        _of("diloco_jax.data.manifest_command", "manifest_command"),
        "PATH [--missing]",
        "read large files of text or tokens once, so that no start does",
    ),
    "init": (
        _of("diloco_jax.config.init_command", "init_command"),
        "FILE [--like CONFIG] [--all]",
        "writes a commented config to start from",
    ),
    "completion": (
        _of("diloco_jax.completion", "completion_command"),
        "bash|zsh|fish",
        "prints a script by which the shell completes commands and options",
    ),
    "doctor": (
        _of("diloco_jax.doctor.command", "doctor_command"),
        "[--folder DIR] [--json]",
        "what is installed here, what jax finds, what the machine gives a run",
    ),
    "certs": (
        _of("diloco_jax.wire.certs_command", "certs_command"),
        "DIR --hosts NAME... [--add]",
        "certificates for mutual TLS",
    ),
}


def _help() -> str:
    from diloco_jax.config.named import names

    lines = ["usage: diloco COMMAND ...   (diloco COMMAND --help tells more)", ""]
    for name, (_, usage, does) in COMMANDS.items():
        lines += [f"  diloco {name} {usage}", f"      {does}"]
    lines += [
        "",
        "CONFIG is a .py file (diloco init writes one), a run's config.json, or one of",
        f"{', '.join(names())}.",
        "Options such as --sync.quorum 2 or --islands.NAME.batch-size 4 override its",
        "fields.",
        "Exit codes: 0 done, 2 bad arguments or config, 3 refused, 1 anything else.",
    ]
    return "\n".join(lines)


def _goes_on(name: str) -> str:
    if name not in ("run", *MEMBERS):
        return " and do it again"
    after = "; what was running goes on after that"
    return f"{after}, a local run with `diloco run --resume WORKDIR`"


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
