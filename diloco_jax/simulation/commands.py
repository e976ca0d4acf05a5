"""`diloco simulate KIND`: options in, tables out, or one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from diloco_jax.config.fields import setting
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.files import require_writable
from diloco_jax.observability.logs import setup_logging
from diloco_jax.options import parse
from diloco_jax.simulation.output import bar, or_dash, show, table, tell

ConfigT = TypeVar("ConfigT")
OutputT = TypeVar("OutputT", bound="Output")


def simulate_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate KIND [options]`."""
    kind = arguments[0] if arguments else "--help"
    if kind in ("-h", "--help"):
        print(_help())
        return 0
    if kind not in KINDS:
        raise ConfigError(
            f"no simulation {kind!r}{suggest(kind, list(KINDS))}; there are "
            f"{', '.join(KINDS)}"
        )
    # Logs of simulated islands are no news: there are many, and their content is
    # counted.
    setup_logging("ERROR")
    return KINDS[kind][0](arguments[1:])


@dataclasses.dataclass(frozen=True)
class Output:
    """Options of the output."""

    json: bool = setting(False, help="Print one JSON object to standard output.")


@dataclasses.dataclass(frozen=True)
class SweepOutput(Output):
    """Options of the output of a command that may sweep."""

    sweep: bool = setting(False, help="Go over methods, chips and islands.")
    out: Path = setting(
        Path(), help="Folder for goodput.csv and goodput.png of a sweep."
    )


def goodput_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate goodput`."""
    from diloco_jax.simulation.fleets import goodput

    default = goodput.GoodputConfig()
    config, output = _parse("goodput", arguments, default, SweepOutput())
    if not output.sweep:
        if output.out != SweepOutput.out:
            raise ConfigError(
                f"--out {output.out} without --sweep, which alone writes files; add "
                f"--sweep or leave out --out"
            )
        with bar("goodput") as progress:
            result = goodput.simulate_goodput(config, progress)
        show(output.json, _goodput_json(result), _goodput_text(result))
        return 0
    for field, values in goodput.SWEPT.items():
        if (value := getattr(config, field)) != getattr(default, field):
            raise ConfigError(
                f"--{field} {value} with --sweep, which goes over {field} "
                f"{', '.join(map(str, values))}; leave out one of them"
            )
    require_writable(output.out, "--out")
    points = goodput.points(config, goodput.CHIPS, goodput.ISLANDS)
    results: list[goodput.GoodputResult] = []
    try:
        with bar("sweep") as progress:
            # One by one: if it is interrupted, the finished points are there.
            results.extend(goodput.simulated(points, progress))
    except KeyboardInterrupt:
        _show_sweep(output.json, results)
        tell(f"{len(results)} of {len(points)} points are done; no file is written")
        raise
    goodput.write_csv(results, output.out / "goodput.csv")
    goodput.write_plot(results, output.out / "goodput.png")
    _show_sweep(output.json, results)
    tell(f"written: {output.out}/goodput.csv, goodput.png")
    return 0


def mix_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate mix`."""
    from diloco_jax.simulation.fleets.mix import MixConfig, simulate_mix

    config, output = _parse("mix", arguments, MixConfig(), Output())
    with bar("mix") as progress:
        rows = simulate_mix(config, progress)
    shown = table("islands wait", "goodput", "published", "participation", "merges/h")
    shown.title = (
        f"{config.v6e} v6e islands, {config.v5p} v5p islands with {config.gap:.0%} "
        f"longer steps, spread {config.step_spread:.0%}, {config.hours:g} h"
    )
    shown.caption = (
        "The published 84 % is for K = 8, where every step waits for all islands: "
        "compare the row lockstep. With K = M here no step waits."
    )
    for row in rows:
        shown.add_row(
            row.name,
            f"{row.goodput:.1%}",
            or_dash(row.published_goodput, ".0%"),
            f"{row.participation:.1%}",
            f"{row.merges_per_hour:.0f}",
        )
    show(output.json, _with_config(config, rows=rows), shown)
    return 0


def scavenge_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate scavenge`."""
    from diloco_jax.simulation.fleets.scavenge import ScavengeConfig, simulate_scavenge

    config, output = _parse("scavenge", arguments, ScavengeConfig(), Output())
    with bar("scavenge") as progress:
        rows = simulate_scavenge(config, progress)
    shown = table("extra", "time", "published", "at best", "elastic, published")
    shown.title = (
        f"{config.islands} islands, and extra ones for {config.tokens_share:.0%} of "
        f"the token budget: training time over that without them"
    )
    shown.caption = (
        "At best: as many tokens at the speed of all islands. Elastic: data-parallel, "
        "which stops to take machines in and to let them go."
    )
    for row in rows:
        shown.add_row(
            f"{row.extra:+.0%}",
            f"{row.time_ratio:.3f}",
            or_dash(row.published_ratio, ".2f"),
            f"{row.best_ratio:.3f}",
            or_dash(row.published_elastic_ratio, ".2f"),
        )
    show(output.json, _with_config(config, rows=rows), shown)
    return 0


def bandwidth_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate bandwidth`."""
    from diloco_jax.simulation.fleets.bandwidth import (
        BandwidthConfig,
        simulate_bandwidth,
    )

    config, output = _parse("bandwidth", arguments, BandwidthConfig(), Output())
    result = simulate_bandwidth(config)
    formulas = result.formulas()
    values = {
        **dataclasses.asdict(result),
        "speedup": result.speedup,
        "formulas": formulas,
    }
    show(output.json, values, "\n".join(formulas))
    return 0


def faults_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate faults`."""
    from diloco_jax.simulation.faults import play

    config, output = _parse("faults", arguments, play.FaultsConfig(), Output())
    report = play.FaultsReport()
    try:
        with bar("faults") as progress:
            report = play.check_faults(
                config,
                progress,
                lambda violation: tell(play.violation_text(violation)),
                report,
            )
    except KeyboardInterrupt:
        show(output.json, report.json(), play.text(report))
        raise
    show(output.json, report.json(), play.text(report))
    return 1 if report.violations else 0


KINDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "goodput": (goodput_command, "chip time left by failures; --sweep"),
    "mix": (mix_command, "unequal islands: waiting for all, for one, with grace"),
    "scavenge": (scavenge_command, "extra islands for a part of the token budget"),
    "bandwidth": (bandwidth_command, "rates that links must carry"),
    "faults": (faults_command, "random faults, and invariants that must hold"),
}


# ---- options ---------------------------------------------------------------------


def _parse(
    kind: str, arguments: Sequence[str], config: ConfigT, output: OutputT
) -> tuple[ConfigT, OutputT]:
    """Read the fields of `config` and `output` as options."""
    prog = f"diloco simulate {kind}"
    parsed, shown = parse([config, output], arguments, prog, str(type(config).__doc__))
    return parsed, shown


# ---- output ----------------------------------------------------------------------


def _show_sweep(as_json: bool, results: Sequence[Any]) -> None:
    points = {"points": [_goodput_json(result) for result in results]}
    show(as_json, points, _sweep_table(results))


def _goodput_json(result: Any) -> dict[str, Any]:
    mean = dataclasses.asdict(result.mean)
    low, high = dataclasses.asdict(result.low), dataclasses.asdict(result.high)
    return {
        **mean,
        "bounds": {name: [low[name], high[name]] for name in mean},
        "published_compute_goodput": result.published,
        **_with_config(result.config, samples=result.samples),
    }


def _goodput_text(result: Any) -> str:
    config = result.config
    published = ""
    if result.published is not None:
        published = f"; published {result.published:.0%}"
    lines = [
        f"{config.label}: {config.chips:,} chips, "
        f"{config.seeds} x {config.seconds / 3600:g} h"
    ]
    for name, form in (
        ("compute_goodput", ".1%"),
        ("goodput", ".1%"),
        ("uptime", ".1%"),
        ("participation", ".1%"),
        ("merges", ",.0f"),
        ("lost_tokens_fraction", ".3%"),
    ):
        mean, low, high = (
            format(getattr(sample, name), form)
            for sample in (result.mean, result.low, result.high)
        )
        lines.append(f"  {name:<21}{mean:>8}  ({low} to {high}{published})")
        published = ""
    return "\n".join(lines)


def _sweep_table(results: Sequence[Any]) -> Table:
    shown = table("way", "chips", "compute goodput", "published", "goodput", "uptime")
    for result in results:
        mean = result.mean
        shown.add_row(
            result.config.label,
            f"{result.config.chips:,}",
            f"{mean.compute_goodput:.1%}",
            or_dash(result.published, ".0%"),
            f"{mean.goodput:.1%}",
            f"{mean.uptime:.1%}",
        )
    return shown


def _with_config(config: Any, **values: Sequence[Any]) -> dict[str, Any]:
    """Return dataclasses as JSON-compatible builtins, together with their config."""
    listed = {n: [dataclasses.asdict(v) for v in rows] for n, rows in values.items()}
    return {**listed, "config": dataclasses.asdict(config)}


def _help() -> str:
    lines = [
        "usage: diloco simulate KIND ...   (diloco simulate KIND --help tells more)",
        "",
    ]
    lines += [f"  {name:<10} {does}" for name, (_, does) in KINDS.items()]
    return "\n".join(lines)
