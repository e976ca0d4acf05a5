"""Advice on a config that does not fit, or whose parts do not suit each other.

Every change is tried before it is advised: the islands that it touches are compiled
again, and the plan is made again. A change that makes the plan worse is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diloco_jax.config import Config, ConfigError, IslandConfig, SyncConfig
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import CODECS
from diloco_jax.core.fragments import EVEN, FragmentPlan
from diloco_jax.core.tiles import MOST_ELEMENTS
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.checks import GB, Change, changed, shown
from diloco_jax.planning.compiler import PlanError
from diloco_jax.planning.compiling import Hbm, IslandPlan
from diloco_jax.planning.plan import LATENCY_S, Advice, Plan

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
Replan = Callable[[Config, FragmentPlan | None, Mapping[str, IslandPlan] | None], Plan]
"""Make the plan of a config, its fragments (None: cut them) and its compiled islands,
without advice."""
Compile = Callable[[Config, str], IslandPlan]
"""Compile one island of a config. Raises ConfigError or PlanError if that fails."""


def advise(
    config: Config,
    plan: Plan,
    fragments: FragmentPlan,
    replan: Replan,
    compile_one: Compile,
) -> list[Advice]:
    """Return advice, the most urgent first. fragments: those of the plan.

    Of a plan by arithmetic only the fragments are judged.
    """
    adviser = _Adviser(config, plan, fragments, replan, compile_one)
    compiled = plan.compiled
    if not compiled:
        return list(adviser.to_even())
    unfit = [name for name, island in compiled.items() if not island.fits]
    if unfit:  # Nothing else is known of such an island.
        return [adviser.to_fit(name) for name in unfit]
    return [
        *(advice for name in compiled for advice in adviser.to_run_well(name)),
        *adviser.to_balance(),
        *adviser.to_merge_in_time(),
        *adviser.to_even(),
        *adviser.to_carry(),
    ]


def unevenness(fragments: FragmentPlan) -> float:
    """Return the size of the largest fragment over the mean."""
    return max(fragments.sizes) * len(fragments.fragments) / fragments.total


class _Adviser:
    """Tries changes of one plan."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        fragments: FragmentPlan,
        replan: Replan,
        compile_one: Compile,
    ) -> None:
        self._config, self._plan, self._fragments = config, plan, fragments
        self._replan, self._compile = replan, compile_one
        self._compiled = plan.compiled

    def to_fit(self, name: str) -> Advice:
        """Change what takes HBM, one field after the other, until the island fits. Drop
        changes that do not help, and those that the last change makes needless."""
        config, best = self._config, self._compiled[name]
        lacks = f"islands.{name} lacks {best.hbm.missing / GB:.2f} GB of HBM per chip"
        kept: Change = {}
        for remedy in TO_FIT:
            wanted = remedy(config.islands[name], best.hbm)
            change = {f"islands.{name}.{field}": v for field, v in wanted.items()}
            then = changed(config, change)
            found = self._try_compile(then, name) if change else None
            if found is None or found.hbm.missing >= best.hbm.missing:
                continue
            if found.fits and self._refuses_more(
                self._replan(then, None, {**self._compiled, name: found})
            ):
                continue
            config, best, before = then, found, kept
            kept = {**kept, **change}
            if best.fits and before:
                alone = self._try_compile(changed(self._config, change), name)
                if alone is not None and alone.fits:
                    best, kept = alone, change
            if best.fits:
                used = best.hbm.used / best.hbm.available
                return Advice(
                    text=f"{lacks}: set {shown(kept)}; compiled so, it fits and uses "
                    f"{used:.0%}",
                    changes=(kept,),
                )
        larger = f"choose a larger topology than {self._compiled[name].topology}"
        if not kept:
            text = f"{lacks}, and no setting that was tried helps: {larger}"
            return Advice(text=text, changes=())
        return Advice(
            text=f"{lacks}; with {shown(kept)} it still lacks "
            f"{best.hbm.missing / GB:.2f} GB, and nothing else that was tried helps: "
            f"set these and {larger}",
            changes=(kept,),
        )

    def to_run_well(self, name: str) -> Iterator[Advice]:
        """Try a batch twice as large where compute is not what binds."""
        own, roofline = self._config.islands[name], self._compiled[name].roofline
        if roofline.binding == "compute" or own.step_seconds > roofline.step_seconds:
            return
        seconds, what = roofline.hbm_seconds, "HBM"
        if roofline.binding == "ici":
            seconds, what = roofline.ici_seconds, "its links"
        batch, now = f"islands.{name}.batch_size", own.batch_size
        better = self._try({batch: 2 * now})
        most = max(UNBALANCED, _unbalance(self._plan))
        if better is None or _unbalance(better) > most:
            return
        gain = _per_day(better) / _per_day(self._plan) - 1
        if gain > 2 * NOISE:
            yield Advice(
                text=f"islands.{name} is bound by {what} ({seconds:.3g} s of it and "
                f"{roofline.compute_seconds:.3g} s of compute per step): raise {batch} "
                f"from {now} to {2 * now}, for {gain:.0%} more tokens a day",
                changes=({batch: 2 * now},),
            )

    def to_balance(self) -> Iterator[Advice]:
        """Try batches with which every step would take as long as the shortest one."""
        times = {n: island.step_seconds for n, island in self._plan.islands.items()}
        fastest = min(times, key=lambda name: times[name])
        for name, seconds in times.items():
            ratio = seconds / times[fastest]
            emulated = self._config.islands[name].step_seconds >= seconds
            if ratio <= UNBALANCED or emulated:
                continue
            for wanted, factor in ((name, 1 / ratio), (fastest, ratio)):
                own = self._config.islands[wanted]
                multiple = own.batch_multiple
                batch = round(own.batch_size * factor / multiple) * multiple
                change = {f"islands.{wanted}.batch_size": batch}
                same = batch in (0, own.batch_size)
                better = None if same else self._try(change)
                if better is None or _unbalance(better) >= _unbalance(self._plan):
                    continue
                yield Advice(
                    text=f"a step of {name} takes {seconds:.3g} s, one of {fastest} "
                    f"{times[fastest]:.3g} s: set {shown(change)}, now "
                    f"{own.batch_size}; compiled so, the longest step is "
                    f"{_unbalance(better):.2f} of the shortest",
                    changes=(change,),
                )
                break

    def to_merge_in_time(self) -> Iterator[Advice]:
        """Lengthen a cycle that has no time for the exchange."""
        run, steps = self._plan.run, self._config.run.sync.steps_per_cycle
        took_part, round_trip = _participation(self._plan), 2 * LATENCY_S
        if run.cycle_seconds >= 2 * round_trip or took_part > 1 - NOISE:
            return
        enough = int(2 * round_trip / run.pacing_step_seconds) + 1
        for longer in (enough, 2 * enough, 4 * enough, 8 * enough):
            change = {"sync.steps_per_cycle": longer}
            better = self._try(change)
            if better is None or _participation(better) <= took_part:
                continue
            yield Advice(
                text=f"a cycle of {run.cycle_seconds:.2g} s is shorter than two round "
                f"trips of {round_trip:g} s, and islands take part in {took_part:.0%} "
                f"of the merges: raise sync.steps_per_cycle from {steps} to {longer}, "
                f"for {_participation(better):.0%}",
                changes=(change,),
            )
            return

    def to_even(self) -> Iterator[Advice]:
        """Find the smallest change with which the fragments are even and the largest is
        no larger than now: it sizes links, merges, snapshots and takes.

        Changes that leave more as it is are tried first. Tiles follow from shapes alone
        and no setting changes them."""
        config, now = self._config, self._fragments
        largest, uneven = max(now.sizes), unevenness(now)
        if uneven <= EVEN:
            return
        said = (
            f"the largest of {len(now.fragments)} fragments is {uneven:.2f} of the "
            f"mean, above {EVEN:g}: it sets the peak of each link, and the memory of "
            f"merges, snapshots and takes"
        )
        model = build(config.run)
        for change in _cuts(config.run.sync, math.ceil(now.total / largest)):
            try:
                cut = build_plan(changed(config, change).validate().run, model)
            except ConfigError:
                continue
            if unevenness(cut) > EVEN or max(cut.sizes) > largest:
                continue
            # Takes and adoptions of other pieces are other programs.
            same = set(cut.pieces) == set(now.pieces)
            if self._try(change, cut) and (same or self._try(change, cut, again=True)):
                less = 1 - max(cut.sizes) / largest
                smaller = f"{less:.0%} smaller" if less >= 0.005 else "no larger"
                yield Advice(
                    text=f"{said}; set {shown(change)}, with which it is "
                    f"{unevenness(cut):.2f} of the mean and {smaller}",
                    changes=(change,),
                )
                return
        pieces = now.fragments[now.sizes.index(largest)]
        piece, run = max(pieces, key=lambda own: own.size), config.run
        yield Advice(
            text=f"{said}; no setting that was tried mends it: its largest piece is "
            f"{piece.name} of {piece.size:,} parameters, with sync.fragment_by = "
            f"{run.sync.fragment_by!r}, sync.merge = {run.sync.merge!r}, "
            f"outer.optimizer = {run.outer.optimizer!r}",
            changes=(),
        )

    def to_carry(self) -> Iterator[Advice]:
        """Give the largest fragment more time, or fewer bytes."""
        name, peak = _busiest(self._plan)
        network = self._plan.islands[name].network
        goodput = self._plan.run.goodput
        assert goodput, "the plan is of compiled islands"
        link = goodput.assumptions.link_gbit_per_s
        if not peak > link >= max(network.up.mean, network.down.mean):
            return
        helping: list[Change] = []
        for change in _carriers(self._config.run.sync, peak / link):
            better = self._try(change)
            if better and _busiest(better)[1] < peak:
                helping.append(change)
                if "sync.overlap_steps" not in change and _busiest(better)[1] <= link:
                    break  # One codec is enough: do not propose both.
        if helping:
            options = ", or ".join(shown(change) for change in helping)
            yield Advice(
                text=f"islands.{name} needs {peak:.3g} Gbit/s while the largest "
                f"fragment is under way, its link has {link:g}, so that this fragment "
                f"is adopted late: set {options}",
                changes=tuple(helping),
            )

    def _try(
        self, change: Change, cut: FragmentPlan | None = None, *, again: bool = False
    ) -> Plan | None:
        """Return the plan with a change; None if it is worse: an island does not fit, a
        check refuses that did not before, or fewer tokens are merged. cut: the changed
        config's fragments. again: compile islands again that are as they were."""
        try:
            config = changed(self._config, change).validate()
        except ConfigError:
            return None
        if not self._compiled:
            plan = self._replan(config, cut, None)
            return None if self._refuses_more(plan) else plan
        sync, now = config.run.sync, self._config.run.sync
        compiled = dict(self._compiled)
        for name, island in config.islands.items():
            if again or island != self._config.islands[name]:
                found = self._try_compile(config, name)
                if found is None:
                    return None
                compiled[name] = found
            elif sync != now:
                hbm = compiled[name].hbm.with_takes(now, sync)
                compiled[name] = dataclasses.replace(
                    compiled[name], hbm=hbm, fits=not hbm.missing
                )
        if not all(island.fits for island in compiled.values()):
            return None
        plan = self._replan(config, cut, compiled)
        less = _per_day(plan) < (1 - NOISE) * _per_day(self._plan)
        return None if less or self._refuses_more(plan) else plan

    def _refuses_more(self, plan: Plan) -> bool:
        """Tell whether a check refuses that did not before."""
        before = {refusal.check for refusal in self._plan.run.refusals}
        return any(refusal.check not in before for refusal in plan.run.refusals)

    def _try_compile(self, config: Config, name: str) -> IslandPlan | None:
        try:
            return self._compile(config.validate(), name)
        except (ConfigError, PlanError):
            return None


def _unbalance(plan: Plan) -> float:
    times = [island.step_seconds for island in plan.islands.values()]
    return max(times) / min(times)


def _per_day(plan: Plan) -> float:
    return plan.run.tokens_per_day or 0.0


def _participation(plan: Plan) -> float:
    return plan.run.goodput.participation if plan.run.goodput else 0.0


def _busiest(plan: Plan) -> tuple[str, float]:
    """Return the island whose link has the highest peak, and that peak."""
    peaks = {
        name: max(island.network.up.peak, island.network.down.peak)
        for name, island in plan.islands.items()
    }
    name = max(peaks, key=lambda name: peaks[name])
    return name, peaks[name]


def _rounds(field: str) -> Callable[[IslandConfig, Hbm], dict[str, Any]]:
    """Return the remedy that cuts the batch into as many rounds as the missing bytes
    ask for, or makes it that much smaller."""

    def remedy(island: IslandConfig, hbm: Hbm) -> dict[str, Any]:
        most = island.batch_size // island.batch_multiple
        share = hbm.share_of_activations
        factor = next(
            d
            for d in range(1, most + 1)
            if most % d == 0 and (d == most or (d > 1 and 1 / d <= share))
        )
        if factor == 1:
            return {}
        if field == "accumulation":
            return {field: island.accumulation * factor}
        return {field: island.batch_size // factor}

    return remedy


TO_FIT: tuple[Callable[[IslandConfig, Hbm], dict[str, Any]], ...] = (
    lambda island, _: {"remat": "full"} if island.remat != "full" else {},
    _rounds("accumulation"),
    # Parameters and optimizer over all devices that have copies of them.
    lambda island, _: (
        {"mesh_data": 1, "mesh_fsdp": island.mesh_data * island.mesh_fsdp}
        if island.mesh_data > 1
        else {}
    ),
    lambda island, _: (
        {"anchor_memory": "pinned_host"} if island.anchor_memory == "device" else {}
    ),
    _rounds("batch_size"),
)
"""Remedies for an island that lacks HBM: fields with other values, or nothing. In the
order in which they are tried: what costs training the least comes first."""


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


def _carriers(sync: SyncConfig, late: float) -> Iterator[Change]:
    """Yield changes for a largest fragment that takes `late` times its window."""
    overlap = math.floor(max(1, sync.overlap_steps) * late) + 1
    longer = {"sync.steps_per_cycle": overlap + 1}
    enough = overlap < sync.steps_per_cycle
    yield {"sync.overlap_steps": overlap} | ({} if enough else longer)
    smaller: dict[str, Any] = {}
    for field in ("codec_down", "codec_up"):
        now = getattr(sync, field)
        sizes = {n: Codec(n).tile_bytes(MOST_ELEMENTS) for n in (*CODECS.table, now)}
        fewer = [name for name in sizes if sizes[name] < sizes[now]]
        if fewer:
            smaller[f"sync.{field}"] = max(fewer, key=lambda name: sizes[name])
    yield from ({field: codec} for field, codec in smaller.items())
    if len(smaller) > 1:
        yield smaller
