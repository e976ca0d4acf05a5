"""`diloco plan CONFIG`: compile every island for its slice and estimate the run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import metadata
from typing import Any

import jax
import msgspec
from rich.console import Console
from rich.table import Table

from diloco_jax.config import Config
from diloco_jax.config.config import require_worth
from diloco_jax.config.resolving import resolve_open
from diloco_jax.errors import EXIT_CONFIG, EXIT_DONE
from diloco_jax.hardware.machines import (
    NOTHING_MEASURED,
    machine_of,
    read_measurements,
)
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.models.build import inner_note
from diloco_jax.models.flops import pictures_note
from diloco_jax.observability.terminal import bar
from diloco_jax.planning import plan as planning
from diloco_jax.planning.compiling import (
    IslandPlan,
    PlanError,
    compile_islands,
    require_libtpu,
)
from diloco_jax.planning.coordinator import CoordinatorPlan, DiskPlan
from diloco_jax.planning.options import (
    PlanOptions,
    parse_prices,
    price_sentence,
    require_prices,
)
from diloco_jax.planning.plan import Plan, PlannedIsland


def run(config: Config, path: str, options: PlanOptions) -> int:
    """Show the plan; return 2 if it would not run.

    Raises ConfigError before anything is compiled.
    """
    options.validate()
    require_worth(config.run)
    config = resolve_open(config)
    for name, island in config.islands.items():
        slice_of(name, island)
    machine_of(config.launch.coordinator_machine)
    if prices := parse_prices(options.price):
        require_prices(config, prices, traffic=True)
    measured = NOTHING_MEASURED
    if options.measured:
        measured = read_measurements(options.measured, config)
    if not options.arithmetic:
        require_libtpu()
    # TPUs of this machine play no part.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    began = time.monotonic()
    console = Console(stderr=True, markup=False)
    with console.status("cutting the model into fragments"):
        fragments = planning.fragments_of(config)
        notes = inner_note(config.run), pictures_note(config.run)
    for note in filter(None, notes):
        console.print(note, highlight=False, soft_wrap=True)
    try:
        with ExitStack() as shown:
            compiled, versions = None, {}
            if options.arithmetic:
                shown.enter_context(console.status("checking links and coordinator"))
            else:
                bars = {n: shown.enter_context(bar(console, n)) for n in config.islands}
                made: Any = compile_islands(config, lambda n, done: bars[n](done))
                compiled = msgspec.convert(made, dict[str, IslandPlan])
                packages = ("diloco-jax", "jax", "libtpu")
                versions = {name: metadata.version(name) for name in packages}
            plan = planning.plan_run(
                path,
                config,
                fragments,
                options.assumptions,
                compiled,
                versions,
                prices,
                measured,
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
    return EXIT_CONFIG if plan.fits is False else EXIT_DONE


# ---- text for people -----------------------------------------------------------------


def render(plan: Plan, console: Console) -> None:
    """Print the islands side by side, then the run, refusals and advice. Each line
    about time says by which speed it is."""
    run, lines, bound = plan.run, list[str](), f"[{plan.run.bound}]"
    groups = _alike(plan)
    if plan.compiled:
        console.print(_islands(plan, groups))
        lines.append(
            f"run: {run.params / 1e9:.4g} B parameters; {bound} a cycle of "
            f"{run.cycle_seconds:.4g} s, {run.tokens_per_second:,.0f} tokens/s"
        )
    else:
        lines.append(
            f"arithmetic, nothing compiled, HBM checked by what rests in it alone: "
            f"{run.params / 1e9:.4g} B parameters; {bound} a cycle of "
            f"{run.cycle_seconds:.4g} s"
        )
        for title, names in groups.items():
            island = plan.islands[names[0]]
            up, down = island.network.up, island.network.down
            kept = island.network.kept_bytes
            lines.append(
                f"{title}: step {island.step_seconds:.4g} s {bound}, Gbit/s up "
                f"{_rates(up.mean, up.peak)}, down {_rates(down.mean, down.peak)}, "
                f"join {island.network.join_seconds:.0f} s, HBM per device at least "
                f"{_size(island.least_hbm_bytes)} of {_size(island.hbm_bytes)}"
                f"{f', each host keeps {_size(kept)} for its region' if kept else ''}"
            )
    lines += _expected(plan, groups)
    about = (*_coordinator(run.coordinator), *run.outage.lines())
    lines += (f"{line} {bound}" for line in about)
    lines.append(run.first_start.line)
    lines += run.rates.lines(run.coordinator.merges.rule)
    if run.measured.disk_write_bytes_per_s is None:
        lines.append("disk: as published for its size and machine (not measured)")
    lines += run.measured.lines()
    lines += (f"REFUSED {bound}: {refusal.text}" for refusal in run.refusals)
    if run.refusals:
        found = run.mended.text if run.mended else "no set of changes was found"
        lines.append(f"all refusals together: {found}")
    lines += (f"note {bound}: {note}" for note in run.notes)
    if run.settings:
        lines.append(f"settings that the links carry {bound}, fewest bytes first:")
    lines += (f"  {setting.line}" for setting in run.settings)
    lines += (f"- {advice.text}" for advice in plan.advice)
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    if plan.versions:
        versions = ", ".join(f"{name} {value}" for name, value in plan.versions.items())
        console.print(f"({versions})", highlight=False, style="dim")


Groups = dict[str, list[str]]
"""Names of islands of which everything is alike, by what they are called together."""


def _alike(plan: Plan) -> Groups:
    alike: list[list[str]] = []
    for name, island in plan.islands.items():
        same = (names for names in alike if plan.islands[names[0]] == island)
        if (names := next(same, None)) is None:
            alike.append(names := [])
        names.append(name)
    return {
        ", ".join(names)
        if len(names) < 3
        else f"{names[0]} and {len(names) - 1} alike": (names)
        for names in alike
    }


def _islands(plan: Plan, groups: Groups) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    compiled = {names[0]: plan.compiled[names[0]] for names in groups.values()}
    for title in groups:
        table.add_column(title, justify="right", no_wrap=True)
    for title, cell in ROWS:
        table.add_row(title, *(cell(plan.islands[n], c) for n, c in compiled.items()))
    for kind in sorted(
        {c.kind for i in compiled.values() for c in i.collectives or ()}
    ):
        table.add_row(f"  {kind}", *(_collective(c, kind) for c in compiled.values()))
    exchange = [
        ", ".join(e.piece for e in i.exchange if e.collectives) or "none"
        for i in compiled.values()
    ]
    table.add_row("  in takes, adoptions", *exchange)
    return table


def _fits(_: PlannedIsland, island: IslandPlan) -> str:
    if island.fits:
        return f"yes, {island.hbm.used / island.hbm.available:.0%} used"
    return f"NO, {_size(island.hbm.missing)} missing"


def _size(octets: float | None) -> str:
    if octets is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if octets < 1000:
            return f"{octets:.3g} {unit}"
        octets /= 1000
    return f"{octets:.2f} GB" if octets < 10_000 else f"{octets / 1000:.1f} TB"


def _collective(island: IslandPlan, kind: str) -> str:
    for found in island.collectives or ():
        if found.kind == kind:
            hidden = found.overlapping_bytes / max(found.sent_bytes, 1)
            return f"{found.count} x, {_size(found.sent_bytes)}, {hidden:.0%}"
    return "-" if island.collectives is None else "none"


def _rates(mean: float, peak: float) -> str:
    return f"{mean:.3g} ({peak:.3g})"


def _hbm(field: str) -> Cell:
    return lambda _, c: _size(getattr(c.hbm, field))


def _seconds(field: str) -> Cell:
    return lambda _, c: f"{getattr(c.roofline, field):.4g} s"


def _flops(field: str) -> Cell:
    def cell(_: PlannedIsland, island: IslandPlan) -> str:
        count = getattr(island.flops, field)
        return "-" if count is None else f"{count:.4g}"

    return cell


Cell = Callable[[PlannedIsland, IslandPlan], str]
ROWS: tuple[tuple[str, Cell], ...] = (
    ("topology", lambda _, c: c.topology),
    ("chips", lambda i, _: str(i.chips)),
    ("fits", _fits),
    ("HBM per device", _hbm("available")),
    ("  parameters", _hbm("parameters")),
    ("  optimizer", _hbm("optimizer")),
    ("  merged model", _hbm("watched")),
    ("  anchors", _hbm("anchors")),
    ("  residuals", _hbm("residuals")),
    ("  open takes", _hbm("open_takes")),
    ("  late takes, more at most", _hbm("late_takes")),
    ("  of these, on the host", _hbm("pinned_host")),
    ("  activations and the rest", _hbm("temporaries")),
    ("tokens per step", lambda i, _: f"{i.tokens_per_step:,}"),
    ("FLOPs per step", _flops("model")),
    ("  by the formula", _flops("analytic")),
    ("  with recomputation", _flops("executed")),
    ("at peak rates: compute", _seconds("compute_seconds")),
    ("  HBM", _seconds("hbm_seconds")),
    ("  ICI", _seconds("ici_seconds")),
    ("  of it not overlapped", _seconds("waiting_seconds")),
    ("  takes, adoptions, per cycle", lambda i, _: f"{i.exchange_seconds:.3g} s"),
    ("bound by", lambda _, c: c.roofline.binding),
    ("step at best", lambda i, _: f"{i.step_seconds:.4g} s"),
    ("tokens/s at best", lambda i, _: f"{i.tokens_per_second:,.0f}"),
    (
        "Gbit/s up, mean (peak)",
        lambda i, _: _rates(i.network.up.mean, i.network.up.peak),
    ),
    (
        "Gbit/s down, mean (peak)",
        lambda i, _: _rates(i.network.down.mean, i.network.down.peak),
    ),
    ("seconds of a join", lambda i, _: f"{i.network.join_seconds:.0f}"),
    ("kept for its region, per host", lambda i, _: _size(i.network.kept_bytes)),
    ("per step: times, sent, asynchronous", lambda *_: ""),
)


def _expected(plan: Plan, groups: Groups) -> Iterator[str]:
    run, firsts = plan.run, {title: names[0] for title, names in groups.items()}
    steps = ", ".join(
        f"{title} {plan.islands[name].expected_step_seconds:.4g} s "
        f"[{plan.islands[name].expected_from}]"
        for title, name in firsts.items()
    )
    yield f"expected steps: {steps}; a cycle of {run.expected_cycle_seconds:.4g} s"
    days = "no end" if run.days is None else f"{run.days:.3g} days"
    hours = run.goodput.mean_hours_between
    outages = ", ".join(
        f"{title} every {hours[name]:,.0f} h"
        for title, name in firsts.items()
        if hours[name] is not None
    )
    yield (
        f"expected goodput {run.goodput.goodput:.1%} (interruptions: "
        f"{outages or 'none'})"
    )
    yield (
        f"expected: {run.tokens_per_day:.4g} tokens per day, {days} to the config's "
        f"total"
    )
    if price := run.price:
        tokens = ""
        if price.per_1e9_tokens is not None:
            tokens = f", {price.per_1e9_tokens:,.2f} per 1e9 tokens"
        yield (
            f"{price_sentence(price.per_hour)}; expected: {price.per_day:,.2f} per day"
            f"{tokens}, with {price.crossing_gb_per_day:,.0f} GB a day between regions"
        )


def _coordinator(plan: CoordinatorPlan) -> tuple[str, ...]:
    disks = [("its disk", plan.disk)]
    if plan.workers:
        largest = max(plan.disks[1:], key=lambda disk: disk.bytes)
        disks = [("the lead's disk", plan.disks[0]), ("a worker's, at most", largest)]
    workers: tuple[str, ...] = ()
    if plan.workers:
        most = max(plan.workers, key=lambda worker: worker.params)
        workers = (
            f"its {len(plan.workers)} workers: each at most {most.fragments} fragments "
            f"of {most.params / 1e9:.4g} B parameters, {_size(most.memory)} of memory, "
            f"{most.cores:.2g} cores on average",
        )
    return (
        f"coordinator: {_size(plan.memory)} of memory ({_size(plan.joins)} of "
        f"it while islands join), {plan.cores} cores, back "
        f"{plan.restart_seconds:.0f} s after it dies",
        *(_disk(whose, disk) for whose, disk in disks),
        *workers,
        plan.merges.line,
    )


def _disk(whose: str, disk: DiskPlan) -> str:
    where = "bucket" if disk.in_bucket else "disk"
    return (
        f"{whose}: {_size(disk.expected)} expected, {_size(disk.reserve)} in reserve, "
        f"log {disk.log_bytes_per_s / 1e6:.3g} MB/s; "
        f"snapshots to the {where}: {_size(disk.snapshots)}, "
        f"{disk.snapshot_bytes_per_s / 1e6:.3g} MB/s"
    )
