"""`diloco plan CONFIG`: compile every island for its slice and estimate the run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diloco_jax.config import Config
from diloco_jax.errors import EXIT_CONFIG, EXIT_DONE
from diloco_jax.hardware.machines import machine_of
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.observability.logs import setup_logging
from diloco_jax.observability.terminal import bar
from diloco_jax.planning.compiler import (
    PlanError,
    Report,
    compile_islands,
    require_libtpu,
)
from diloco_jax.planning.options import PlanOptions, parse_prices, require_prices

if TYPE_CHECKING:
    from diloco_jax.core.fragments import FragmentPlan
    from diloco_jax.planning.compiling import IslandPlan
    from diloco_jax.planning.plan import Plan


def run(config: Config, path: str, options: PlanOptions) -> int:
    """Show the plan; return 2 if it would not run.

    Raises ConfigError before anything is compiled.
    """
    options.validate()
    # The simulated islands of a plan must not log.
    setup_logging("ERROR")
    for name, island in config.islands.items():
        slice_of(name, island)
    machine_of(config.launch.coordinator_machine)
    if prices := parse_prices(options.price):
        require_prices(config, prices)
    if not options.arithmetic:
        require_libtpu()
    import jax

    from diloco_jax.planning import plan as planning
    from diloco_jax.planning.report import render

    # TPUs of this machine play no part.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    began = time.monotonic()
    console = Console(stderr=True, markup=False)
    with console.status("cutting the model into fragments"):
        fragments = planning.fragments_of(config)
    try:
        with ExitStack() as shown:
            if options.arithmetic:
                shown.enter_context(console.status("checking links and coordinator"))
                bars = {}
            else:
                bars = {n: shown.enter_context(bar(console, n)) for n in config.islands}
            plan = _plan(
                path,
                config,
                options,
                fragments,
                prices,
                lambda name, share: bars[name](share),
            )
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(plan.as_json()))
    else:
        render(plan, console)
        took = f"(this plan took {time.monotonic() - began:.0f} s)"
        console.print(took, highlight=False, style="dim")
    return EXIT_DONE if plan.fits else EXIT_CONFIG


def _plan(
    path: str,
    config: Config,
    options: PlanOptions,
    fragments: FragmentPlan,
    prices: Mapping[str, float],
    report: Report,
) -> Plan:
    """Compile, plan, and try what may be better."""
    import dataclasses

    import msgspec

    from diloco_jax.planning import plan as planning
    from diloco_jax.planning.advice import advise
    from diloco_jax.planning.compiling import IslandPlan

    packages = () if options.arithmetic else ("diloco-jax", "jax", "libtpu")
    versions = {name: metadata.version(name) for name in packages}

    def plan_of(
        then: Config, cut: FragmentPlan, compiled: Mapping[str, IslandPlan] | None
    ) -> Plan:
        return planning.plan_run(
            path, then, cut, options.assumptions, compiled, versions, prices
        )

    def compiled_of(config: Config, *names: str) -> dict[str, IslandPlan]:
        made: Any = compile_islands(config, report, names)
        return msgspec.convert(made, dict[str, IslandPlan])

    compiled = None if options.arithmetic else compiled_of(config)
    plan = plan_of(config, fragments, compiled)
    advice = advise(
        config,
        plan,
        fragments,
        plan_of,
        lambda config, name: compiled_of(config, name)[name],
    )
    return dataclasses.replace(plan, advice=tuple(advice))
