"""Advice: single changes of a fixed list, each tried before it is told.

What could be better has a value, and changes that may lower it. The islands that a
change touches are compiled again, and the plan is made again. Of the changes with which
nothing else gets worse the first is told that is enough, or else the best.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from diloco_jax.config import Config, ConfigError, IslandConfig, SyncConfig
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import CODECS
from diloco_jax.core.fragments import EVEN, FragmentPlan
from diloco_jax.core.tiles import MOST_ELEMENTS
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.checks import GB, Change, Remedy, changed, shown
from diloco_jax.planning.compiler import PlanError
from diloco_jax.planning.compiling import Hbm, IslandPlan
from diloco_jax.planning.plan import LATENCY_S, Plan

UNBALANCED = 1.15
"""Ratio of the longest step to the shortest from which advice is given."""
NOISE = 0.005
"""Share by which the simulated goodput of equal plans may differ."""
NEAR = 4
"""First, numbers of fragments within 1 / NEAR of the present one are tried."""
MOST = 2
"""At most 1 / MOST more fragments are tried, and at least so many that even fragments
are no larger than the largest one now."""
BY_ELEMENT = "mean"
"""The merge rule that leaves no tensor whole: it cuts every large one into bands."""
Replan = Callable[[Config, FragmentPlan, Mapping[str, IslandPlan] | None], Plan]
"""Make the plan of a config, its fragments and its compiled islands, without advice."""
Compile = Callable[[Config, str], IslandPlan]
"""Compile one island of a config. Raises ConfigError or PlanError if that fails."""


class Tried(NamedTuple):
    """A config, its plan and its fragments."""

    config: Config
    plan: Plan
    fragments: FragmentPlan


class Symptom(NamedTuple):
    """Something that could be better."""

    name: str
    value: Callable[[Tried], float]
    """Lower is better."""
    enough: float
    """A value that needs no more changes."""
    text: Callable[[Tried], str]
    changes: Iterable[Change]
    """Changes that may lower the value; what costs the training least comes first."""
    otherwise: str = ""
    """Remedy that is told where no change is enough; empty: nothing is said then."""


def advise(
    config: Config,
    plan: Plan,
    fragments: FragmentPlan,
    replan: Replan,
    compile_one: Compile,
) -> list[Remedy]:
    """Return advice, the most urgent first. fragments: those of the plan.

    Of a plan by arithmetic only the fragments are judged. Where an island does not fit,
    nothing else is known.
    """
    now, found = Tried(config, plan, fragments), []
    for symptom in _symptoms(now):
        least, best, change = symptom.value(now), now, Change()
        for one in symptom.changes:
            then = _try(one, now, replan, compile_one)
            if then and least - symptom.value(then) > 2 * NOISE * abs(least):
                least, best, change = symptom.value(then), then, one
                if least <= symptom.enough:
                    break
        text = symptom.text(now)
        if change:
            text += f": set {shown(change)}; then {symptom.text(best)}"
        elif symptom.otherwise:
            text += ", and no setting that was tried helps"
        if least > symptom.enough and symptom.otherwise:
            text += f"; {symptom.otherwise}"
        if change or symptom.otherwise:
            found.append(Remedy(check=symptom.name, text=text, change=change))
    return found


def unevenness(fragments: FragmentPlan) -> float:
    """Return the size of the largest fragment over the mean."""
    return max(fragments.sizes) * len(fragments.fragments) / fragments.total


def _try(
    change: Change, now: Tried, replan: Replan, compile_one: Compile
) -> Tried | None:
    """Return the plan with a change; None if it is worse: one more island does not fit,
    a check refuses that did not before, steps differ more, or fewer tokens are merged.
    """
    plan, before, compiled = now.plan, now.config, dict(now.plan.compiled)
    try:
        config = changed(before, change).validate()
        cut = now.fragments
        if config.run != before.run:
            cut = build_plan(config.run, build(config.run))
        # Takes and adoptions of other pieces are other programs.
        others = set(cut.pieces) != set(now.fragments.pieces)
        for name, island in plan.compiled.items():
            if others or config.islands[name] != before.islands[name]:
                compiled[name] = compile_one(config, name)
            else:
                hbm = island.hbm.with_takes(before.run.sync, config.run.sync)
                compiled[name] = dataclasses.replace(
                    island, hbm=hbm, fits=not hbm.missing
                )
    except (ConfigError, PlanError):
        return None
    found = replan(config, cut, compiled or None)
    refused = {refusal.check for refusal in plan.run.refusals}
    worse = any(refusal.check not in refused for refusal in found.run.refusals)
    worse |= any(i.fits and not compiled[n].fits for n, i in plan.compiled.items())
    if all(island.fits for island in plan.compiled.values()):  # Else: who knows.
        worse |= _unbalance(found) > max(UNBALANCED, _unbalance(plan))
        worse |= _per_day(found) < (1 - NOISE) * _per_day(plan)
    return None if worse else Tried(config, found, cut)


# ---- symptoms -----------------------------------------------------------------------


def _symptoms(now: Tried) -> Iterator[Symptom]:
    """Yield what could be better, the most urgent first."""
    compiled = now.plan.compiled
    unfit = [name for name, island in compiled.items() if not island.fits]
    if unfit:
        yield from (_lacking(now, name) for name in unfit)
        return
    if compiled:
        for name in compiled:
            yield from _bound(now, name)
        yield from _unbalanced(now)
        yield from _short_cycle(now)
    yield from _uneven(now)
    if compiled:
        yield from _late(now)


def _lacking(now: Tried, name: str) -> Symptom:
    """An island that lacks HBM."""

    def text(tried: Tried) -> str:
        hbm = tried.plan.compiled[name].hbm
        if not hbm.missing:
            return f"it fits and uses {hbm.used / hbm.available:.0%}"
        return f"islands.{name} lacks {hbm.missing / GB:.2f} GB of HBM per chip"

    island, compiled = now.config.islands[name], now.plan.compiled[name]
    smaller = _smaller(island, compiled.hbm)
    return Symptom(
        "hbm",
        lambda tried: tried.plan.compiled[name].hbm.missing,
        0.0,
        text,
        ({f"islands.{name}.{f}": v for f, v in own.items()} for own in smaller),
        f"choose a larger topology than {compiled.topology}, or more of these changes",
    )


def _smaller(island: IslandConfig, hbm: Hbm) -> Iterator[dict[str, Any]]:
    """Yield fields with other values that take less HBM."""
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


def _bound(now: Tried, name: str) -> Iterator[Symptom]:
    """An island whose step takes longer than its compute: twice the batch may help."""

    def text(tried: Tried) -> str:
        times = tried.plan.compiled[name].roofline
        return (
            f"a step of islands.{name} has {times.compute_seconds:.3g} s of compute, "
            f"{times.hbm_seconds:.3g} s of HBM and {times.ici_seconds:.3g} s of its "
            f"links, and {_per_day(tried.plan):.4g} tokens are merged a day"
        )

    own, roofline = now.config.islands[name], now.plan.compiled[name].roofline
    if roofline.binding != "compute" and own.step_seconds <= roofline.step_seconds:
        change = {f"islands.{name}.batch_size": 2 * own.batch_size}
        yield Symptom("batch", lambda t: -_per_day(t.plan), -math.inf, text, [change])


def _unbalanced(now: Tried) -> Iterator[Symptom]:
    """Steps of different length: batches with which they would be equal."""
    times = {name: island.step_seconds for name, island in now.plan.islands.items()}
    slow, fast = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
    ratio, changes = times[slow] / times[fast], list[Change]()
    if ratio <= UNBALANCED or now.config.islands[slow].step_seconds >= times[slow]:
        return
    for name, factor in ((slow, 1 / ratio), (fast, ratio)):
        own = now.config.islands[name]
        batch = round(own.batch_size * factor / own.batch_multiple) * own.batch_multiple
        if batch not in (0, own.batch_size):
            changes.append({f"islands.{name}.batch_size": batch})
    yield Symptom(
        "balance",
        lambda tried: _unbalance(tried.plan),
        UNBALANCED,
        lambda tried: (
            f"a step of {slow} takes {tried.plan.islands[slow].step_seconds:.3g} s, "
            f"one of {fast} {tried.plan.islands[fast].step_seconds:.3g} s"
        ),
        changes,
    )


def _short_cycle(now: Tried) -> Iterator[Symptom]:
    """A cycle that has no time for the exchange."""

    def missed(tried: Tried) -> float:
        goodput = tried.plan.run.goodput
        return 1 - goodput.participation if goodput else 1.0

    run, round_trip = now.plan.run, 2 * LATENCY_S
    if run.cycle_seconds >= 2 * round_trip or missed(now) < NOISE:
        return
    enough = int(2 * round_trip / run.pacing_step_seconds) + 1
    yield Symptom(
        "cycle",
        missed,
        NOISE,
        lambda tried: (
            f"islands take part in {1 - missed(tried):.0%} of the merges, with cycles "
            f"of {tried.plan.run.cycle_seconds:.2g} s and round trips of "
            f"{round_trip:g} s"
        ),
        [{"sync.steps_per_cycle": times * enough} for times in (1, 2, 4, 8)],
    )


def _uneven(now: Tried) -> Iterator[Symptom]:
    """A largest fragment that sizes links, merges, snapshots and takes. Tiles follow
    from shapes alone and no setting changes them."""
    run, cut, largest = now.config.run, now.fragments, max(now.fragments.sizes)
    if unevenness(cut) <= EVEN:
        return

    def even() -> Iterator[Change]:
        """Changes with which the largest is no larger than now."""
        model = build(run)
        for change in _cuts(run.sync, math.ceil(cut.total / largest)):
            try:
                then = build_plan(changed(now.config, change).validate().run, model)
            except ConfigError:
                continue
            if unevenness(then) <= EVEN and max(then.sizes) <= largest:
                yield change

    pieces = cut.fragments[cut.sizes.index(largest)]
    piece = max(pieces, key=lambda own: own.size)
    yield Symptom(
        "fragments",
        lambda tried: unevenness(tried.fragments),
        EVEN,
        lambda tried: (
            f"the largest of {len(tried.fragments.fragments)} fragments has "
            f"{max(tried.fragments.sizes):,} parameters, "
            f"{unevenness(tried.fragments):.2f} of the mean; it sets the peak of each "
            f"link, and the memory of merges, snapshots and takes"
        ),
        even(),
        f"above {EVEN:g} of the mean is uneven; its largest piece is {piece.name} of "
        f"{piece.size:,} parameters, with sync.fragment_by = {run.sync.fragment_by!r}, "
        f"sync.merge = {run.sync.merge!r}, outer.optimizer = {run.outer.optimizer!r}",
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


def _late(now: Tried) -> Iterator[Symptom]:
    """A largest fragment that is adopted late: more time for it, or fewer bytes."""

    def busiest(tried: Tried) -> tuple[float, str]:
        links = {name: island.network for name, island in tried.plan.islands.items()}
        return max((max(n.up.peak, n.down.peak), name) for name, n in links.items())

    sync, (peak, name) = now.config.run.sync, busiest(now)
    network, goodput = now.plan.islands[name].network, now.plan.run.goodput
    assert goodput, "the plan is of compiled islands"
    link = goodput.assumptions.link_gbit_per_s
    if not peak > link >= max(network.up.mean, network.down.mean):
        return
    overlap = math.floor(max(1, sync.overlap_steps) * peak / link) + 1
    changes: list[Change] = [{"sync.overlap_steps": overlap}]
    if overlap >= sync.steps_per_cycle:
        changes[0]["sync.steps_per_cycle"] = overlap + 1
    for field in ("codec_down", "codec_up"):
        codec = getattr(sync, field)
        sizes = {n: Codec(n).tile_bytes(MOST_ELEMENTS) for n in (*CODECS.table, codec)}
        if fewer := [other for other in sizes if sizes[other] < sizes[codec]]:
            changes.append({f"sync.{field}": max(fewer, key=sizes.__getitem__)})
    yield Symptom(
        "late",
        lambda tried: busiest(tried)[0],
        link,
        lambda tried: (
            f"islands.{busiest(tried)[1]} needs {busiest(tried)[0]:.3g} Gbit/s while "
            f"the largest fragment is under way, which is adopted late where its link "
            f"has less; it has {link:g}"
        ),
        changes,
    )


def _unbalance(plan: Plan) -> float:
    times = [island.step_seconds for island in plan.islands.values()]
    return max(times) / min(times)


def _per_day(plan: Plan) -> float:
    return plan.run.tokens_per_day or 0.0
