"""`diloco plan CONFIG`: compile every island for its slice and estimate the run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console

from diloco_jax.config import Config
from diloco_jax.errors import EXIT_CONFIG, EXIT_DONE
from diloco_jax.hardware.chips import chip_of
from diloco_jax.hardware.machines import machine_of
from diloco_jax.hardware.slices import slice_of
from diloco_jax.observability.logs import setup_logging
from diloco_jax.observability.terminal import progress_lines
from diloco_jax.planning.options import PlanOptions
from diloco_jax.planning.price import parse_prices, require_prices
from diloco_jax.planning.processes import (
    PlanError,
    Report,
    compile_islands,
    require_libtpu,
)

if TYPE_CHECKING:
    from diloco_jax.core.fragments import FragmentPlan
    from diloco_jax.planning.compiling import IslandPlan
    from diloco_jax.planning.report import Plan


def run(config: Config, path: str, options: PlanOptions) -> int:
    """Show the plan; return 2 if it would not run.

    Raises ConfigError before anything is compiled.
    """
    options.validate()
    # The simulated islands of `goodput` must not log.
    setup_logging("ERROR")
    for name, island in config.islands.items():
        chip_of(slice_of(name, island))
    machine_of(config.launch.coordinator_machine)
    if prices := parse_prices(options.price):
        require_prices(config, prices)
    if not options.arithmetic:
        require_libtpu()
    import jax

    from diloco_jax.planning.arithmetic import plan_by_arithmetic
    from diloco_jax.planning.report import fragments_of
    from diloco_jax.planning.table import render, render_arithmetic

    # TPUs of this machine play no part.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    began = time.monotonic()
    console = Console(stderr=True, markup=False)
    with console.status("cutting the model into fragments"):
        fragments = fragments_of(config)
    if options.arithmetic:
        with console.status("checking links and coordinator"):
            guess = plan_by_arithmetic(
                path, config, fragments, options.link_gbit_per_s, prices
            )
        if options.json:
            print(json.dumps(guess.as_json()))
        else:
            render_arithmetic(guess, console)
            _took(began, console)
        return EXIT_DONE if guess.fits else EXIT_CONFIG
    try:
        plan = _plan(path, config, options, fragments, prices, console)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(plan.as_json()))
    else:
        render(plan, console)
        _took(began, console)
    return EXIT_DONE if plan.fits else EXIT_CONFIG


def _took(began: float, console: Console) -> None:
    seconds = time.monotonic() - began
    console.print(f"(this plan took {seconds:.0f} s)", highlight=False, style="dim")


def _plan(
    path: str,
    config: Config,
    options: PlanOptions,
    fragments: FragmentPlan,
    prices: Mapping[str, float],
    console: Console,
) -> Plan:
    """Compile, plan, and try what may be better."""
    import msgspec

    from diloco_jax.planning.advice import advise
    from diloco_jax.planning.compiling import IslandPlan
    from diloco_jax.planning.report import fragments_of, plan_run

    first = config
    versions = {n: metadata.version(n) for n in ("diloco-jax", "jax", "libtpu")}

    def plan_of(config: Config, compiled: Mapping[str, IslandPlan]) -> Plan:
        return plan_run(
            path,
            config,
            compiled,
            fragments if config.run == first.run else fragments_of(config),
            options.assumptions,
            versions,
            prices,
        )

    with _bars(console, list(config.islands)) as report:

        def compiled_of(config: Config, *names: str) -> dict[str, IslandPlan]:
            made: Any = compile_islands(config, report, names)
            return msgspec.convert(made, dict[str, IslandPlan])

        compiled = compiled_of(config)
        for name in config.islands:
            report(name, "simulating the run", 1.0)
        plan = plan_of(config, compiled)
        return plan.with_advice(
            advise(
                config,
                plan,
                fragments,
                plan_of,
                lambda config, name: compiled_of(config, name)[name],
            )
        )


@contextmanager
def _bars(console: Console, names: list[str]) -> Iterator[Report]:
    """Show one bar per island on a terminal, and remove them when all are done;
    elsewhere lines of text."""
    if not console.is_terminal:
        plain = {name: progress_lines(console, name) for name in names}
        yield lambda name, doing, share: plain[name](share)
        return
    columns = (
        bars.TextColumn("{task.fields[island]}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.description}"),
    )
    with bars.Progress(*columns, console=console, transient=True) as shown:
        tasks = {
            name: shown.add_task("waiting", total=1.0, island=name) for name in names
        }

        def report(name: str, doing: str, share: float) -> None:
            shown.update(tasks[name], description=doing, completed=share)

        yield report
