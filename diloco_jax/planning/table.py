"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from diloco_jax.planning import price
from diloco_jax.planning.arithmetic import ArithmeticPlan
from diloco_jax.planning.changes import Change, shown
from diloco_jax.planning.checks import Shortfall
from diloco_jax.planning.coordinator import CoordinatorPlan
from diloco_jax.planning.disk import DiskPlan
from diloco_jax.planning.report import Plan
from diloco_jax.planning.results import Advice, PlannedIsland, RunPlan

Cell = Callable[[PlannedIsland], str]


def render(plan: Plan, console: Console) -> None:
    """Print the islands side by side, then the run, then the advice."""
    console.print(_islands(plan))
    console.print(_run(plan.run), highlight=False, soft_wrap=True)
    _refuse(plan.run.refusals, plan.run.mending, console)
    _advise(plan.advice, console)
    versions = ", ".join(f"{name} {value}" for name, value in plan.versions.items())
    console.print(f"({versions})", highlight=False, style="dim")


def render_arithmetic(plan: ArithmeticPlan, console: Console) -> None:
    """Print the needs of a plan without a compiler."""
    lines = [
        f"arithmetic, nothing compiled, HBM not checked: {plan.params / 1e9:.4g} B "
        f"parameters, a cycle of {plan.needs.cycle_seconds:.4g} s",
        *(
            f"{name}: step {plan.step_seconds[name]:.4g} s at peak rates, Gbit/s up "
            f"{_rates(n.up.mean, n.up.peak)}, down {_rates(n.down.mean, n.down.peak)}, "
            f"join {n.join_seconds:.0f} s"
            for name, n in plan.needs.networks.items()
        ),
        *_coordinator(plan.needs.coordinator, plan.needs.restart_seconds),
        *plan.rates.lines(plan.needs.coordinator.merges.cost.rule),
        *_price(plan.price_per_hour),
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    _refuse(plan.refusals, plan.mending, console)
    _advise(plan.advice, console)


def _refuse(refusals: list[Shortfall], mending: Change, console: Console) -> None:
    for refusal in refusals:
        console.print(f"REFUSED: {refusal.text}", highlight=False, soft_wrap=True)
    if len(refusals) > 1:
        console.print(
            f"all of them together: set {shown(mending)}"
            if mending
            else "no set of changes that this plan knows mends all of them",
            highlight=False,
            soft_wrap=True,
        )


def _advise(advice: Sequence[Advice], console: Console) -> None:
    for line in advice:
        console.print(f"- {line.text}", highlight=False, soft_wrap=True)


def _islands(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in plan.islands:
        table.add_column(name, justify="right", no_wrap=True)
    for title, cell in ROWS:
        table.add_row(title, *(cell(island) for island in plan.islands.values()))
    for kind in sorted(
        {c.kind for i in plan.islands.values() for c in i.compiled.collectives or ()}
    ):
        table.add_row(
            f"  {kind}", *(_collective(i, kind) for i in plan.islands.values())
        )
    table.add_row(
        "  in takes, adoptions", *(_in_exchange(i) for i in plan.islands.values())
    )
    return table


def _fits(island: PlannedIsland) -> str:
    hbm = island.compiled.hbm
    if island.compiled.fits:
        return f"yes, {hbm.used / hbm.available:.0%} used"
    return f"NO, {_size(hbm.missing)} missing"


def _size(octets: float | None) -> str:
    if octets is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if octets < 1000:
            return f"{octets:.3g} {unit}"
        octets /= 1000
    return f"{octets:.2f} GB" if octets < 10_000 else f"{octets / 1000:.1f} TB"


def _flops(count: float | None) -> str:
    return "-" if count is None else f"{count:.4g}"


def _collective(island: PlannedIsland, kind: str) -> str:
    for found in island.compiled.collectives or ():
        if found.kind == kind:
            hidden = found.overlapping_bytes / max(found.sent_bytes, 1)
            return f"{found.count} x, {_size(found.sent_bytes)}, {hidden:.0%}"
    return "-" if island.compiled.collectives is None else "none"


def _in_exchange(island: PlannedIsland) -> str:
    found = [e.piece for e in island.compiled.exchange if e.collectives]
    return ", ".join(found) if found else "none"


ROWS: tuple[tuple[str, Cell], ...] = (
    ("topology", lambda i: i.compiled.topology),
    ("chips", lambda i: str(i.compiled.chips)),
    ("fits", _fits),
    ("HBM per chip", lambda i: _size(i.compiled.hbm.available)),
    ("  parameters", lambda i: _size(i.compiled.hbm.parameters)),
    ("  optimizer", lambda i: _size(i.compiled.hbm.optimizer)),
    ("  merged model", lambda i: _size(i.compiled.hbm.watched)),
    ("  anchors", lambda i: _size(i.compiled.hbm.anchors)),
    ("  residuals", lambda i: _size(i.compiled.hbm.residuals)),
    ("  open takes", lambda i: _size(i.compiled.hbm.open_takes)),
    ("  late takes, more at most", lambda i: _size(i.compiled.hbm.late_takes)),
    ("  of these, on the host", lambda i: _size(i.compiled.hbm.pinned_host)),
    ("  activations and the rest", lambda i: _size(i.compiled.hbm.temporaries)),
    ("tokens per step", lambda i: f"{i.compiled.tokens_per_step:,}"),
    ("FLOPs per step", lambda i: f"{i.compiled.flops.model:.4g}"),
    ("  by the formula", lambda i: _flops(i.compiled.flops.analytic)),
    ("  with recomputation", lambda i: f"{i.compiled.flops.executed:.4g}"),
    (
        "at peak rates: compute",
        lambda i: f"{i.compiled.roofline.compute_seconds:.4g} s",
    ),
    ("  HBM", lambda i: f"{i.compiled.roofline.hbm_seconds:.4g} s"),
    ("  ICI", lambda i: f"{i.compiled.roofline.ici_seconds:.4g} s"),
    (
        "  of it not overlapped",
        lambda i: f"{i.compiled.roofline.waiting_seconds:.4g} s",
    ),
    (
        "  takes, adoptions, per cycle",
        lambda i: f"{i.exchange_seconds:.3g} s",
    ),
    ("bound by", lambda i: i.compiled.roofline.binding),
    ("step at best", lambda i: f"{i.step_seconds:.4g} s"),
    ("tokens/s at best", lambda i: f"{i.tokens_per_second:,.0f}"),
    ("Gbit/s up, mean (peak)", lambda i: _rates(i.network.up.mean, i.network.up.peak)),
    (
        "Gbit/s down, mean (peak)",
        lambda i: _rates(i.network.down.mean, i.network.down.peak),
    ),
    ("seconds of a join", lambda i: f"{i.network.join_seconds:.0f}"),
    ("per step: times, sent, overlap", lambda i: ""),
)


def _rates(mean: float, peak: float) -> str:
    return f"{mean:.3g} ({peak:.3g})"


def _run(run: RunPlan) -> str:
    goodput, coordinator = run.goodput, run.coordinator
    days = "no end" if run.days is None else f"{run.days:.3g} days"
    outages = ", ".join(
        f"{name} every {hours:,.0f} h"
        for name, hours in goodput.mean_hours_between.items()
        if hours is not None
    )
    return "\n".join(
        (
            f"run: {run.params / 1e9:.4g} B parameters, a cycle of "
            f"{run.cycle_seconds:.4g} s, {run.tokens_per_second:,.0f} tokens/s at best",
            f"expected goodput {goodput.goodput:.1%} ({goodput.undisturbed:.1%} "
            f"without interruptions{'; ' if outages else ''}{outages}), participation "
            f"{goodput.participation:.1%}",
            f"{run.tokens_per_day:.4g} tokens per day, {days} to the config's total",
            *_coordinator(coordinator, run.restart_seconds),
            *run.rates.lines(coordinator.merges.cost.rule),
            *_price(run.price_per_hour),
        )
    )


def _coordinator(plan: CoordinatorPlan, restart_seconds: float) -> tuple[str, ...]:
    disks = [("its disk", plan.disk)]
    if plan.disks:
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
        f"coordinator: {_size(plan.memory)} of memory ({_size(plan.joins)} of it while "
        f"islands join), {plan.cores} cores, back {restart_seconds:.0f} s after it "
        f"dies",
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


def _price(per_hour: dict[str, float] | None) -> tuple[str, ...]:
    return () if per_hour is None else (price.sentence(per_hour),)
