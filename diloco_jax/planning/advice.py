"""Advice: changes that would make a plan better, and what settings of a link cost.

Advice is a single change of a fixed list. What is arithmetic, the cut into fragments
and what links carry, is tried before it is told: nothing else gets worse with it. A
change that the compiler has to judge is told untried: another `diloco plan` with it
says what it gives. Where checks refuse, one set of changes that mends all of them is
sought, and planned before it is told.

Fewer bytes on a link may cost loss. `LOSSES` has what was measured of that; nothing
here picks a setting by it.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from diloco_jax.config import ConfigError, IslandConfig, SyncConfig
from diloco_jax.config.resolving import LONG
from diloco_jax.core.fragments import EVEN, FragmentPlan
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.checks import (
    GB,
    LINK_UTILISATION,
    Needs,
    Rates,
    Remedy,
    busiest_link,
    failing,
    needs_of,
)
from diloco_jax.planning.compiling import Hbm, IslandPlan
from diloco_jax.planning.terms import Change, Terms, shown

NEAR = 4
"""First, numbers of fragments within 1 / NEAR of the present one are tried."""
MOST = 2
"""At most 1 / MOST more fragments are tried, and at least so many that even fragments
are no larger than the largest one now."""
BY_ELEMENT = "mean"
"""The merge rule that leaves no tensor whole: it cuts every large one into bands."""


def advise(terms: Terms, compiled: Mapping[str, IslandPlan]) -> list[Remedy]:
    """Return advice on a plan, the most urgent first.

    compiled: the islands by name; empty if the plan is arithmetic alone, of which only
    the fragments are judged. Where an island does not fit, nothing else is known.
    """
    if unfit := [name for name, island in compiled.items() if not island.fits]:
        return [_lacking(terms, name, compiled[name]) for name in unfit]
    found = [_bound(terms, name, island) for name, island in compiled.items()]
    found += [_uneven(terms), _late(terms) if compiled else None]
    return [advice for advice in found if advice]


def unevenness(fragments: FragmentPlan) -> float:
    """Return the size of the largest fragment over the mean."""
    return max(fragments.sizes) * len(fragments.fragments) / fragments.total


# ---- for another compilation --------------------------------------------------------


def _lacking(terms: Terms, name: str, compiled: IslandPlan) -> Remedy:
    """Name what takes less HBM, for an island that lacks some."""
    own = _smaller(terms.config.islands[name], compiled.hbm)
    changes = [{f"islands.{name}.{field}": v for field, v in c.items()} for c in own]
    text = (
        f"islands.{name} lacks {compiled.hbm.missing / GB:.2f} GB of HBM per chip: try "
        f"{''.join(f'{shown(change)}, or ' for change in changes)}a larger topology "
        f"than {compiled.topology}"
    )
    return Remedy(check="hbm", text=text, change=next(iter(changes), Change()))


def _smaller(island: IslandConfig, hbm: Hbm) -> Iterator[dict[str, Any]]:
    """Yield fields with other values that take less HBM; what costs the training least
    comes first."""
    most, share = island.batch_size // island.batch_multiple, hbm.share_of_activations
    # As many rounds as the missing bytes ask for.
    rounds = next(
        d
        for d in range(1, most + 1)
        if most % d == 0 and (d == most or (d > 1 and 1 / d <= share))
    )
    if island.remat != "full":
        yield {"remat": "full"}
    if rounds > 1:
        yield {"accumulation": island.accumulation * rounds}
    if island.mesh_data > 1:
        # Parameters and optimizer over all devices that have copies of them.
        yield {"mesh_data": 1, "mesh_fsdp": island.mesh_data * island.mesh_fsdp}
    if island.anchor_memory == "device":
        yield {"anchor_memory": "pinned_host"}
    if rounds > 1:
        yield {"batch_size": island.batch_size // rounds}


def _bound(terms: Terms, name: str, compiled: IslandPlan) -> Remedy | None:
    """Propose twice the batch to an island whose step takes longer than its compute, if
    twice its activations would fit."""
    own, times, hbm = terms.config.islands[name], compiled.roofline, compiled.hbm
    if times.binding == "compute" or own.step_seconds > times.step_seconds:
        return None
    if hbm.used + (hbm.temporaries or 0) > hbm.available:
        return None
    change = {f"islands.{name}.batch_size": 2 * own.batch_size}
    text = (
        f"a step of islands.{name} has {times.compute_seconds:.3g} s of compute, "
        f"{times.hbm_seconds:.3g} s of HBM and {times.ici_seconds:.3g} s of its links: "
        f"try {shown(change)}"
    )
    return Remedy(check="batch", text=text, change=change)


# ---- tried by arithmetic ------------------------------------------------------------


def _uneven(terms: Terms) -> Remedy | None:
    """Propose another cut, where the largest fragment sizes links, merges, snapshots
    and takes. Tiles follow from shapes alone and no setting changes them."""
    run, cut, largest = terms.config.run, terms.fragments, max(terms.fragments.sizes)
    if unevenness(cut) <= EVEN:
        return None
    before, model = failing(terms).keys(), build(run)
    for change in _cuts(run.sync, math.ceil(cut.total / largest)):
        then = terms.changed(change)
        try:
            fragments = build_plan(then.config.validate().run, model)
        except ConfigError:
            continue
        then = dataclasses.replace(then, fragments=fragments)
        if unevenness(fragments) > EVEN or max(fragments.sizes) > largest:
            continue
        if failing(then).keys() <= before:
            text = f"{_largest(cut)}: set {shown(change)}; then {_largest(fragments)}"
            return Remedy(check="fragments", text=text, change=change)
    pieces = cut.fragments[cut.sizes.index(largest)]
    piece = max(pieces, key=lambda own: own.size)
    text = (
        f"{_largest(cut)}, and no setting that was tried helps; above {EVEN:g} of the "
        f"mean is uneven; its largest piece is {piece.name} of {piece.size:,} "
        f"parameters, with sync.fragment_by = {run.sync.fragment_by!r}, sync.merge = "
        f"{run.sync.merge!r}, outer.optimizer = {run.outer.optimizer!r}"
    )
    return Remedy(check="fragments", text=text, change={})


def _largest(cut: FragmentPlan) -> str:
    return (
        f"the largest of {len(cut.fragments)} fragments has {max(cut.sizes):,} "
        f"parameters, {unevenness(cut):.2f} of the mean; it sets the peak of each "
        f"link, and the memory of merges, snapshots and takes"
    )


def _cuts(sync: SyncConfig, fewest: int) -> Iterator[Change]:
    """Yield other numbers of fragments near the present one, fragments by size, numbers
    further away, then a merge rule that goes element by element."""
    now, most = sync.fragments, sync.fragments + sync.fragments // MOST
    counts = sorted(range(fewest, most + 1), key=lambda count: abs(count - now))
    near = [count for count in counts if abs(count - now) <= now // NEAR]
    yield from ({"sync.fragments": count} for count in near if count != now)
    if sync.fragment_by != "size":
        yield {"sync.fragment_by": "size"}
    yield from ({"sync.fragments": count} for count in counts[len(near) :])
    if sync.merge != BY_ELEMENT:
        yield {"sync.merge": BY_ELEMENT}


def _late(terms: Terms) -> Remedy | None:
    """Propose more overlap for a largest fragment that is adopted late. Takes of that
    time need HBM; which codecs would do is told apart (`settings_that_fit`)."""
    peak, link, name = _peak(terms, needs_of(terms))
    if peak <= link or "link" in failing(terms):
        return None
    sync, change = terms.config.run.sync, Change()
    overlap = math.floor(max(1, sync.overlap) * peak / link) + 1
    said = "take codecs or a cycle of those that the links carry"
    if overlap < sync.cycle:
        change = {"sync.overlap_steps": overlap}
        said = f"try {shown(change)}, or {said}"
    text = (
        f"islands.{name} needs {peak:.3g} Gbit/s while the largest fragment is under "
        f"way, which is adopted late where its link has less; it has {link:g}: {said}"
    )
    return Remedy(check="late", text=text, change=change)


def _peak(terms: Terms, needs: Needs) -> tuple[float, float, str]:
    return busiest_link(terms, needs, lambda rates: rates.peak)


# ---- what a link carries ------------------------------------------------------------


class Loss(NamedTuple):
    """A measured difference of the validation loss at equal tokens."""

    codec: str
    """Of deltas and publishes."""
    cycle: float
    """Length of a cycle over the one that it is compared with."""
    over: str
    difference: str
    """Percent, half of the 95 % interval, and the number of pairs; negative is better.
    """
    size: str
    """Parameters and tokens of the runs."""


LOSSES = (
    Loss("int8", 1.0, "bf16 both ways", "+0.1 % ± 0.1 (14)", "0.1 M, 8 M tokens"),
    Loss("int8", 1.0, "bf16 both ways", "-0.1 % ± 0.3 (7)", "0.3 M, 7 M tokens"),
    Loss("int4", 1.0, "bf16 both ways", "+0.2 % ± 0.2 (20)", "0.1 M, 8 M tokens"),
    Loss("int4", 1.0, "bf16 both ways", "+0.1 % ± 0.4 (7)", "0.3 M, 7 M tokens"),
    Loss(
        "int4", 14 / 24, "int8, H = P = 24", "-1.7 % ± 0.5 (5)", "0.1 M, 1.2 M tokens"
    ),
    Loss("int4", 14 / 24, "int8, H = P = 24", "-1.8 % ± 0.6 (3)", "0.3 M, 7 M tokens"),
    Loss("int4", 12 / 24, "int8, H = P = 24", "-3.0 % (1)", "0.1 M, 1.2 M tokens"),
)
"""docs/results/quality.md, from docs/results/raw/quality.json, 2026-12-01: 8 equal
islands on 2 cores of an AMD EPYC. Nothing larger was measured."""
TRIED_CODECS = tuple(dict.fromkeys(loss.codec for loss in LOSSES))
TRIED_CYCLES = tuple(dict.fromkeys(loss.cycle for loss in LOSSES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSetting:
    """Settings of the exchange that the links carry, with what they cost."""

    change: Change
    """Values by field that are not those of the config; empty for its own."""
    bytes_per_step: float
    """Bytes of an island per step, both ways."""
    share: float
    """The same over those of the config's own settings."""
    up: Rates
    """Of the island whose link has the least to spare."""
    down: Rates
    memory: int
    """Bytes of the coordinator's memory."""
    losses: tuple[str, ...]
    """Measured differences of the loss, each with its size; empty if nobody measured
    this."""

    @property
    def line(self) -> str:
        """A line for people."""
        loss = "; ".join(self.losses) or "loss not measured"
        return (
            f"{shown(self.change) or 'as it is'}: {self.share:.2f} of the bytes, "
            f"Gbit/s up {self.up.mean:.3g} ({self.up.peak:.3g}), down "
            f"{self.down.mean:.3g} ({self.down.peak:.3g}), "
            f"coordinator {self.memory / GB:.3g} GB; {loss}"
        )


OF_LINK = frozenset({"link", "egress", "memory", "merge buffer", "merging"})
"""Checks that a setting of the exchange has to pass."""


def settings_that_fit(terms: Terms) -> list[LinkSetting]:
    """Return the codecs and lengths of a cycle whose bytes the links carry, on average
    and while the largest fragment is under way, and that the coordinator can hold;
    those with the fewest bytes first. Of those with more bytes than the config's own,
    the ones whose loss was measured. It picks none."""
    found = list[LinkSetting]()
    sync, now = terms.config.run.sync, _bytes_per_step(terms, needs_of(terms))
    pairs = {(up, down) for up in TRIED_CODECS for down in TRIED_CODECS}
    # A short cycle may be as long as that of a long run, too.
    parts = dict.fromkeys((*TRIED_CYCLES, LONG.cycle / min(sync.cycle, LONG.cycle)))
    for up, down in sorted({*pairs, (sync.codec_up, sync.codec_down)}):
        for part in parts:
            cycle = math.ceil(sync.cycle * part)
            wanted = {"codec_up": up, "codec_down": down, "steps_per_cycle": cycle}
            own = {field: getattr(sync, field) for field in wanted}
            change = {f"sync.{f}": v for f, v in wanted.items() if own[f] != v}
            then = terms.changed(change)
            try:
                then.config.validate()
            except ConfigError:
                continue
            needs = needs_of(then)
            peak, link, name = _peak(then, needs)
            if peak > link or OF_LINK & failing(then).keys():
                continue
            size = _bytes_per_step(then, needs)
            one = LinkSetting(
                change=change,
                bytes_per_step=size,
                share=size / now,
                up=needs.networks[name].up,
                down=needs.networks[name].down,
                memory=needs.coordinator.memory,
                losses=tuple(_losses(up, down, part, sync.cycle)),
            )
            if one.share <= 1 or one.losses:
                found.append(one)
    return sorted(found, key=lambda setting: setting.bytes_per_step)


def _bytes_per_step(terms: Terms, needs: Needs) -> float:
    network = next(iter(needs.networks.values()))
    gbit = (network.up.mean + network.down.mean) * terms.pacing_step_seconds
    return LINK_UTILISATION * gbit / 8 * GB


def _losses(up: str, down: str, part: float, cycle: int) -> Iterator[str]:
    """Yield what was measured of a codec at this part of a cycle, of which parts were
    measured in long ones alone."""
    measured = [loss for loss in LOSSES if loss.cycle == 1.0 or cycle >= LONG.cycle]
    for loss in measured:
        if up == down == loss.codec and part == loss.cycle:
            yield f"loss {loss.difference} over {loss.over}, at {loss.size}"


# ---- all refusals together ----------------------------------------------------------

MORE = "placement.workers"
"""Field of which more means more machines."""
WORKERS = (2, 4, 8, 16, 32, 64)
"""Numbers of workers that are tried together with other changes."""
MOST_TRIED = 50
"""Changes that a check proposes and that are looked at, at most."""
MOST_CHANGES = 8
"""Changes in a set at most."""


def mended(terms: Terms) -> Remedy | None:
    """Return one set of changes with which no check refuses; None if none was found.

    Changes are taken one after the other, each the one that leaves the least missing.
    Those that turn out to be of no use are left out again. More workers are tried if
    nothing else mends.
    """
    return _mended(terms, more_workers=False) or _mended(terms, more_workers=True)


def _mended(terms: Terms, *, more_workers: bool) -> Remedy | None:
    now, taken = terms, list[Change]()
    while wrong := _missing(now):
        if len(taken) == MOST_CHANGES:
            return None
        found = _candidates(now, more_workers=more_workers)
        whole = [_with_buffer(now, change) for change in found]
        tried = [(change, _missing(now.changed(change))) for change in whole]
        best, left = min(tried, key=lambda one: one[1], default=({}, wrong))
        if left >= wrong:
            return None
        now, taken = now.changed(best), [*taken, best]
    together: Change = {}
    for change in taken:
        together |= change
    for path in list(together):
        less = {other: value for other, value in together.items() if other != path}
        # Topology and mesh go together, and so do mesh and batch.
        with contextlib.suppress(ConfigError):
            then = terms.changed(less)
            then.config.validate()
            if not _missing(then):
                together = less
    text = f"set {shown(together)}: planned so, no check refuses"
    return Remedy(check="together", text=text, change=together)


def _with_buffer(terms: Terms, change: Change) -> Change:
    """Return the change with a merge buffer that is large enough for it: each of more
    workers needs its own."""
    lacks = failing(terms.changed(change)).get("merge buffer")
    return change | next(iter(lacks.changes)) if lacks else change


def _candidates(terms: Terms, *, more_workers: bool) -> Iterator[Change]:
    """Yield what each refusing check would change, of values of the same fields the
    first that is enough for it, and more workers."""
    for name, check in failing(terms).items():
        alike: dict[tuple[str, ...], list[Change]] = {}
        allowed = (c for c in check.changes if more_workers or MORE not in c)
        for change in itertools.islice(allowed, MOST_TRIED):
            alike.setdefault(tuple(change), []).append(change)
        for changes in alike.values():
            enough = bisect.bisect_left(
                changes, True, key=lambda c: name not in failing(terms.changed(c))
            )
            yield changes[min(enough, len(changes) - 1)]
    most = len(terms.fragments.fragments) if more_workers else 0
    for count in WORKERS:
        if terms.config.placement.workers < count <= most:
            yield {MORE: count}


def _missing(terms: Terms) -> float:
    """Return by how much checks refuse, over all of them: 0 if none does."""
    return sum(
        math.log(check.needed / check.available) + 1e-9
        for check in failing(terms).values()
    )
