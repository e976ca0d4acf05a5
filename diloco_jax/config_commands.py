"""The commands that take a config: each reads it, sets the environment that jax will
find, and hands over. Nothing heavy is imported before that."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from diloco_jax import run_files
from diloco_jax.collector import uncollected
from diloco_jax.config import Config
from diloco_jax.errors import ConfigError
from diloco_jax.paths import absolute

T = TypeVar("T")


def run_command(arguments: Sequence[str]) -> int:
    """Run `diloco run CONFIG`: coordinator and all islands on this machine."""
    from diloco_jax.cluster.commands import island_environment

    # Before anything imports jax: the baseline trains here, on the islands' platform.
    os.environ["JAX_PLATFORMS"] = island_environment()["JAX_PLATFORMS"]
    from diloco_jax.machine import fit_threads

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
        dashboard=options.dashboard,
    )
    if options.json:
        print(json.dumps(summary))
    return code


def chaos_command(arguments: Sequence[str]) -> int:
    """Run `diloco chaos CONFIG, WORKDIR or HOST:PORT`: a local run whose processes and
    links are struck; that of a workdir goes on already, as does one elsewhere."""
    from rich.console import Console

    from diloco_jax.chaos.options import ChaosOptions

    console = Console(stderr=True, markup=False)
    if arguments and Path(arguments[0]).is_dir():
        from diloco_jax.chaos.attach import strike_running
        from diloco_jax.options import parse

        about = "Strike a run of this machine that goes on, from now on."
        workdir = Path(absolute(arguments[0]))
        (options,) = parse(
            [ChaosOptions], arguments[1:], f"diloco chaos {arguments[0]}", about
        )
        code, findings = strike_running(workdir, console, options)
    elif arguments and _is_address(arguments[0]):
        from diloco_jax.chaos.options import RemoteChaosOptions
        from diloco_jax.chaos.remote import strike_remote
        from diloco_jax.options import parse

        about = "Strike a run that goes on and whose placement.chaos is on."
        (remote,) = parse(
            [RemoteChaosOptions], arguments[1:], f"diloco chaos {arguments[0]}", about
        )
        options, (code, findings) = remote, strike_remote(arguments[0], console, remote)
    else:
        path, config, options = _config_and_options("chaos", arguments, ChaosOptions())
        from diloco_jax.chaos.command import run

        code, findings = run(config, path, console, options)
    if options.json:
        print(json.dumps(findings))
    return code


def _is_address(text: str) -> bool:
    """Tell HOST:PORT from the path of a config."""
    _, colon, port = text.rpartition(":")
    return bool(colon) and port.isdecimal()


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
    from diloco_jax.before_jax import require_flags
    from diloco_jax.machine import fit_threads

    # Before anything imports jax.
    fit_threads()
    require_flags()
    with uncollected():
        from diloco_jax.config.resolving import resolve
        from diloco_jax.coordinator import going_on
        from diloco_jax.coordinator.main import run
        from diloco_jax.observability.logs import setup_logging

    if options.spare and not _is_told():
        return 0
    setup_logging()
    options.check_run()
    if options.run_id:
        going_on.require_run(workdir, options.run_id)
    if not options.init:
        config = going_on.with_beginning_of(config, workdir)
    config = resolve(config, copied=True)
    code: int = run(
        config,
        workdir,
        init=bool(options.init),
        resume=options.resume,
        gathers=options.run_id,
    )
    return code


def worker_command(arguments: Sequence[str]) -> int:
    """Run `diloco worker CONFIG --index N --workdir DIR`."""
    from diloco_jax.coordinator.workers.outpost.options import WorkerOptions

    _, config, options = _config_and_options("worker", arguments, WorkerOptions())
    bind, workdir = options.address(config.placement), _workdir(config)
    with uncollected():
        from diloco_jax.coordinator.workers.outpost.command import run
        from diloco_jax.observability.logs import setup_logging

    setup_logging()
    code: int = run(config, options.index, workdir, bind)
    return code


def island_command(arguments: Sequence[str]) -> int:
    """Run `diloco island CONFIG --name NAME --coordinator HOST:PORT --workdir DIR`."""
    from diloco_jax.island.options import IslandOptions

    _, config, options = _config_and_options("island", arguments, IslandOptions())
    workdir = _workdir(config)
    options.check(config)
    from diloco_jax.island.environment import prepare_island
    from diloco_jax.memory import one_arena
    from diloco_jax.wire.addresses import require_loopback

    require_loopback(options.coordinator)
    # Before anything imports jax, or starts a thread.
    one_arena()
    prepare_island(config.island(options.name))
    with uncollected():
        from diloco_jax.config.resolving import resolve
        from diloco_jax.island.hosts.meeting import WorldAddress
        from diloco_jax.island.main import run
        from diloco_jax.island.of_run import with_model_of_run
        from diloco_jax.observability.logs import setup_logging

    if options.spare and not _is_told():
        return 0
    incarnation = options.incarnation
    if not incarnation:
        from diloco_jax.cluster.attempts import next_attempt
        from diloco_jax.workdir import make_workdir

        make_workdir(workdir)
        incarnation = next_attempt(workdir / run_files.ATTEMPTS, options.name)
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


def _is_told() -> bool:
    """Wait, as a spare process, until it is to join the run; False: it never is."""
    return bool(sys.stdin.buffer.readline())


def emulate_command(arguments: Sequence[str]) -> int:
    """Run `diloco emulate CONFIG`: all islands in this process, in virtual time."""
    from diloco_jax.simulation.emulation.options import CommandOptions

    path, config, options = _config_and_options("emulate", arguments, CommandOptions())
    from diloco_jax.before_jax import prepare_environment, skip_absent_tpu
    from diloco_jax.hardware.tpus import generation_here
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
    """Run `diloco launch CONFIG --on tpu_vm|gke|sky`."""
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
    from diloco_jax.config.named import names
    from diloco_jax.options import ANY_ISLAND, parse_with_config

    prog, launches = f"diloco {command} CONFIG", command == "launch"
    if arguments and arguments[0] in ("-h", "--help"):
        shown = Config(islands=ANY_ISLAND)
        parse_with_config(shown, ["--help"], options, prog, launches=launches)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"CONFIG comes first: {prog} [options]"
            f"{f'; found {arguments[0]!r}' if arguments else ''}; give the path to a "
            f".py file or to a run's config.json, or one of the names "
            f"{', '.join(names())}"
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
