"""Advice: single changes of a fixed list that would make a plan better.

What is arithmetic, the cut into fragments and what links carry, is tried before it is
told: nothing else gets worse with it. A change that the compiler has to judge is told
untried: another `diloco plan` with it says what it gives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from diloco_jax.config import ConfigError, IslandConfig, RunConfig, SyncConfig
from diloco_jax.config.config import COSTLY
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import CODECS
from diloco_jax.core.fragments import EVEN, FragmentPlan
from diloco_jax.core.tiles import MOST_ELEMENTS
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.checks import (
    GB,
    Change,
    Needs,
    Remedy,
    Terms,
    failing,
    needs_of,
    shown,
)
from diloco_jax.planning.compiling import Hbm, IslandPlan, open_fragments

UNBALANCED = 1.15
"""Ratio of the longest step to the shortest from which advice is given."""
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
    found += [_unbalanced(terms) if compiled else None, _uneven(terms)]
    found += [_late(terms, compiled) if compiled else None]
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


def _unbalanced(terms: Terms) -> Remedy | None:
    """Propose the batch with which steps of different length would be equal."""
    times, islands = terms.step_seconds, terms.config.islands
    slow, fast = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
    ratio = times[slow] / times[fast]
    if ratio <= UNBALANCED or islands[slow].step_seconds >= times[slow]:
        return None
    for name, factor in ((slow, 1 / ratio), (fast, ratio)):
        own = islands[name]
        batch = round(own.batch_size * factor / own.batch_multiple) * own.batch_multiple
        if batch not in (0, own.batch_size):
            change = {f"islands.{name}.batch_size": batch}
            text = (
                f"a step of {slow} takes {times[slow]:.3g} s, one of {fast} "
                f"{times[fast]:.3g} s: try {shown(change)}"
            )
            return Remedy(check="balance", text=text, change=change)
    return None


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


def _late(terms: Terms, compiled: Mapping[str, IslandPlan]) -> Remedy | None:
    """Propose more time, or fewer bytes, for a largest fragment that is adopted late:
    the first change that is enough."""
    now, link, before = needs_of(terms), terms.link_gbit_per_s, failing(terms).keys()
    peak, name = _peak(now)
    up, down = now.networks[name].up, now.networks[name].down
    if not peak > link >= max(up.mean, down.mean):
        return None
    text = (
        f"islands.{name} needs {peak:.3g} Gbit/s while the largest fragment is under "
        f"way, which is adopted late where its link has less; it has {link:g}"
    )
    sync = terms.config.run.sync
    for change in _lighter(terms.config.run, peak / link):
        then = terms.changed(change)
        more = open_fragments(then.config.run.sync) / open_fragments(sync) - 1
        fits = all(
            i.hbm.pinned_host or i.hbm.used + more * i.hbm.open_takes <= i.hbm.available
            for i in compiled.values()
        )
        after, _ = _peak(needs_of(then))
        if fits and after <= link and failing(then).keys() <= before:
            text += f": set {shown(change)}; then it needs {after:.3g}"
            return Remedy(check="late", text=text, change=change)
    return None


def _peak(needs: Needs) -> tuple[float, str]:
    """Return the highest rate that an island's link needs, and the island."""
    links = needs.networks.items()
    return max((max(link.up.peak, link.down.peak), name) for name, link in links)


def _lighter(run: RunConfig, factor: float) -> Iterator[Change]:
    """Yield a longer overlap, and the next smaller codec each way, unless it costs too
    much of the loss."""
    sync, inner = run.sync, run.inner.optimizer
    overlap = math.floor(max(1, sync.overlap_steps) * factor) + 1
    if overlap < sync.steps_per_cycle:
        yield {"sync.overlap_steps": overlap}
    else:
        yield {"sync.overlap_steps": overlap, "sync.steps_per_cycle": overlap + 1}
    for field in ("codec_down", "codec_up"):
        codec = getattr(sync, field)
        sizes = {n: Codec(n).tile_bytes(MOST_ELEMENTS) for n in (*CODECS.table, codec)}
        smaller = [other for other in sizes if sizes[other] < sizes[codec]]
        if fewer := [other for other in smaller if (other, inner) not in COSTLY]:
            yield {f"sync.{field}": max(fewer, key=sizes.__getitem__)}
