"""Advice on a config that does not fit, or whose parts do not suit each other.

Every change is tried before it is advised: the islands that it touches are compiled
again, and the plan is made again. A change that makes the plan worse is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from diloco_jax.config import Config, ConfigError
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.planning import evenness, remedies
from diloco_jax.planning.changes import Change, changed, shown
from diloco_jax.planning.checks import GB
from diloco_jax.planning.compiling import IslandPlan
from diloco_jax.planning.goodput import LATENCY_S
from diloco_jax.planning.processes import PlanError
from diloco_jax.planning.report import Plan
from diloco_jax.planning.results import Advice

UNBALANCED = 1.15
"""Ratio of the longest step to the shortest from which advice is given."""
NOISE = 0.005
"""Share by which the simulated goodput of equal plans may differ."""
Replan = Callable[[Config, Mapping[str, IslandPlan]], Plan]
"""Cut a config's model, and make the plan from its compiled islands, without advice."""
Compile = Callable[[Config, str], IslandPlan]
"""Compile one island of a config. Raises ConfigError or PlanError if that fails."""


def advise(
    config: Config,
    plan: Plan,
    fragments: FragmentPlan,
    replan: Replan,
    compile_one: Compile,
) -> list[Advice]:
    """Return advice, the most urgent first. fragments: those of the plan."""
    adviser = _Adviser(config, plan, replan, compile_one)
    unfit = [n for n, island in plan.islands.items() if not island.compiled.fits]
    if unfit:  # Nothing else is known of such an island.
        return [adviser.to_fit(name) for name in unfit]
    return [
        *(a for name in plan.islands for a in adviser.to_run_well(name)),
        *adviser.to_balance(),
        *adviser.to_merge_in_time(),
        *evenness.to_even(config, fragments, adviser.is_no_worse(fragments)),
        *adviser.to_carry(),
    ]


class _Adviser:
    """Tries changes of one plan."""

    def __init__(
        self, config: Config, plan: Plan, replan: Replan, compile_one: Compile
    ) -> None:
        self._config, self._plan = config, plan
        self._replan, self._compile = replan, compile_one
        self._compiled = {n: i.compiled for n, i in plan.islands.items()}

    def to_fit(self, name: str) -> Advice:
        """Change what takes HBM, one field after the other, until the island fits. Drop
        changes that do not help, and those that the last change makes needless."""
        config, best = self._config, self._compiled[name]
        lacks = f"islands.{name} lacks {best.hbm.missing / GB:.2f} GB of HBM per chip"
        kept: dict[str, object] = {}
        for remedy in remedies.TO_FIT:
            wanted = remedy(config.islands[name], best.hbm)
            if not wanted:
                continue
            change = {f"islands.{name}.{field}": v for field, v in wanted.items()}
            then = changed(config, change)
            found = self._try_compile(then, name)
            if found is None or found.hbm.missing >= best.hbm.missing:
                continue
            if found.fits and self._refuses_more(
                self._replan(then, {**self._compiled, name: found})
            ):
                continue
            config, best = then, found
            kept |= change
            if best.fits:
                if len(kept) > len(change):
                    alone = self._try_compile(changed(self._config, change), name)
                    if alone is not None and alone.fits:
                        best, kept = alone, change
                used = best.hbm.used / best.hbm.available
                return Advice(
                    text=f"{lacks}: set {shown(kept)}; compiled so, it fits and uses "
                    f"{used:.0%}",
                    changes=(kept,),
                )
        larger = f"choose a larger topology than {self._compiled[name].topology}"
        if not kept:
            return Advice(
                text=f"{lacks}, and no setting that was tried helps: {larger}",
                changes=(),
            )
        return Advice(
            text=f"{lacks}; with {shown(kept)} it still lacks "
            f"{best.hbm.missing / GB:.2f} GB, and nothing else that was tried helps: "
            f"set these and {larger}",
            changes=(kept,),
        )

    def to_run_well(self, name: str) -> Iterator[Advice]:
        """Try a batch twice as large where compute is not what binds."""
        island, own = self._plan.islands[name], self._config.islands[name]
        roofline = island.compiled.roofline
        if roofline.binding == "compute" or own.step_seconds > roofline.step_seconds:
            return
        seconds, what = roofline.hbm_seconds, "HBM"
        if roofline.binding == "ici":
            seconds, what = roofline.ici_seconds, "its links"
        batch = f"islands.{name}.batch_size"
        change = {batch: 2 * own.batch_size}
        better = self._try(change)
        if better is None or _unbalance(better) > max(
            UNBALANCED, _unbalance(self._plan)
        ):
            return
        gain = better.run.tokens_per_day / self._plan.run.tokens_per_day - 1
        if gain > 2 * NOISE:
            yield Advice(
                text=f"islands.{name} is bound by {what} ({seconds:.3g} s of it and "
                f"{roofline.compute_seconds:.3g} s of compute per step): raise {batch} "
                f"from {own.batch_size} to {2 * own.batch_size}, for {gain:.0%} more "
                f"tokens a day",
                changes=(change,),
            )

    def to_balance(self) -> Iterator[Advice]:
        """Try batches with which every step would take as long as the shortest one."""
        times = {n: island.step_seconds for n, island in self._plan.islands.items()}
        fastest = min(times, key=lambda name: times[name])
        for name, seconds in times.items():
            if (
                seconds <= UNBALANCED * times[fastest]
                or self._config.islands[name].step_seconds >= seconds
            ):
                continue
            for wanted, share in (
                (name, times[fastest] / seconds),
                (fastest, seconds / times[fastest]),
            ):
                own = self._config.islands[wanted]
                multiple = own.batch_multiple
                batch = round(own.batch_size * share / multiple) * multiple
                field = f"islands.{wanted}.batch_size"
                if batch in (0, own.batch_size):
                    continue
                better = self._try({field: batch})
                if better is None or _unbalance(better) >= _unbalance(self._plan):
                    continue
                yield Advice(
                    text=f"a step of {name} takes {seconds:.3g} s, one of {fastest} "
                    f"{times[fastest]:.3g} s: set {field} = {batch}, now "
                    f"{own.batch_size}; compiled so, the longest step is "
                    f"{_unbalance(better):.2f} of the shortest",
                    changes=({field: batch},),
                )
                break

    def to_merge_in_time(self) -> Iterator[Advice]:
        """Lengthen a cycle that has no time for the exchange."""
        run, steps = self._plan.run, self._config.run.sync.steps_per_cycle
        took_part = run.goodput.participation
        round_trip = 2 * LATENCY_S
        if run.cycle_seconds >= 2 * round_trip or took_part > 1 - NOISE:
            return
        enough = int(2 * round_trip / run.pacing_step_seconds) + 1
        for longer in (enough, 2 * enough, 4 * enough, 8 * enough):
            change = {"sync.steps_per_cycle": longer}
            better = self._try(change)
            if better is None or better.run.goodput.participation <= took_part:
                continue
            yield Advice(
                text=f"a cycle of {run.cycle_seconds:.2g} s is shorter than two round "
                f"trips of {round_trip:g} s, and islands take part in {took_part:.0%} "
                f"of the merges: raise sync.steps_per_cycle from {steps} to {longer}, "
                f"for {better.run.goodput.participation:.0%}",
                changes=(change,),
            )
            return

    def is_no_worse(self, fragments: FragmentPlan) -> evenness.Accepts:
        """Return the trial of another cut of the model into fragments."""

        def accepts(change: Change, then: Config, cut: FragmentPlan) -> bool:
            if self._try(change) is None:
                return False
            # Takes and adoptions of other pieces are other programs.
            same = set(cut.pieces) == set(fragments.pieces)
            return same or self._try(change, compile_all=True) is not None

        return accepts

    def to_carry(self) -> Iterator[Advice]:
        """Give the largest fragment more time, or fewer bytes."""
        sync = self._config.run.sync
        link = self._plan.run.goodput.assumptions.link_gbit_per_s
        name, peak = _busiest(self._plan)
        network = self._plan.islands[name].network
        if not peak > link >= max(network.up.mean, network.down.mean):
            return
        helping: list[Change] = []
        for change in remedies.to_carry(sync, peak / link):
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

    def _try(self, change: Change, *, compile_all: bool = False) -> Plan | None:
        """Return the plan with a change; None if it is worse: an island does not fit, a
        check refuses that did not before, or fewer tokens are merged. compile_all:
        compile islands again that are as they were."""
        try:
            config = changed(self._config, change).validate()
        except ConfigError:
            return None
        compiled = dict(self._compiled)
        for name, island in config.islands.items():
            if compile_all or island != self._config.islands[name]:
                found = self._try_compile(config, name)
                if found is None:
                    return None
                compiled[name] = found
            elif config.run.sync != self._config.run.sync:
                hbm = compiled[name].hbm.with_takes(
                    self._config.run.sync, config.run.sync
                )
                fits = not hbm.missing
                compiled[name] = dataclasses.replace(compiled[name], hbm=hbm, fits=fits)
        plan = self._replan(config, compiled)
        worse = (
            any(not island.compiled.fits for island in plan.islands.values())
            or self._refuses_more(plan)
            or plan.run.tokens_per_day < (1 - NOISE) * self._plan.run.tokens_per_day
        )
        return None if worse else plan

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


def _busiest(plan: Plan) -> tuple[str, float]:
    """Return the island whose link has the highest peak, and that peak."""
    peaks = {
        name: max(island.network.up.peak, island.network.down.peak)
        for name, island in plan.islands.items()
    }
    name = max(peaks, key=lambda name: peaks[name])
    return name, peaks[name]
