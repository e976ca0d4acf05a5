"""`diloco plan CONFIG`: compile every island for its slice and estimate the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from rich import progress as bars
from rich.console import Console

from diloco_jax.config import Config
from diloco_jax.exit_codes import EXIT_CONFIG, EXIT_DONE
from diloco_jax.launch.order import slice_of
from diloco_jax.observability.logs import setup_logging
from diloco_jax.planning.chips import chip_of
from diloco_jax.planning.machines import machine_of
from diloco_jax.planning.options import PlanOptions
from diloco_jax.planning.price import parse_prices, require_prices
from diloco_jax.planning.processes import (
    PlanError,
    Report,
    compile_islands,
    require_libtpu,
)


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
    import msgspec

    from diloco_jax.planning.arithmetic import plan_by_arithmetic
    from diloco_jax.planning.compiling import IslandPlan
    from diloco_jax.planning.report import fragments_of, plan_run
    from diloco_jax.planning.table import render, render_arithmetic

    # TPUs of this machine play no part.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    fragments = fragments_of(config)
    console = Console(stderr=True, markup=False)
    if options.arithmetic:
        guess = plan_by_arithmetic(
            path, config, fragments, options.link_gbit_per_s, prices
        )
        if options.json:
            print(json.dumps(guess.as_json()))
        else:
            render_arithmetic(guess, console)
        return EXIT_DONE if guess.fits else EXIT_CONFIG
    try:
        with _bars(console, list(config.islands)) as report:
            compiled = compile_islands(config, report)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    plan = plan_run(
        path,
        config,
        {name: msgspec.convert(p, IslandPlan) for name, p in compiled.items()},
        fragments,
        options.assumptions,
        {name: metadata.version(name) for name in ("diloco-jax", "jax", "libtpu")},
        prices,
    )
    if options.json:
        print(json.dumps(plan.as_json()))
    else:
        render(plan, console)
    return EXIT_DONE if plan.fits else EXIT_CONFIG


@contextmanager
def _bars(console: Console, names: list[str]) -> Iterator[Report]:
    """Show one bar per island on a terminal; remove them when all are done."""
    columns = (
        bars.TextColumn("{task.fields[island]}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.description}"),
    )
    hidden = not console.is_terminal
    with bars.Progress(
        *columns, console=console, transient=True, disable=hidden
    ) as shown:
        tasks = {
            name: shown.add_task("waiting", total=1.0, island=name) for name in names
        }

        def report(name: str, doing: str, share: float) -> None:
            shown.update(tasks[name], description=doing, completed=share)

        yield report
