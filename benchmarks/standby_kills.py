"""The leading one of two coordinators is killed again and again at random instants.

Question: two islands train under a coordinator and its standby. SIGKILL meets whichever
leads, 4 to 20 s apart; a supervisor starts the killed one again up to two time budgets
later, as the standby of the other. Does somebody lead again each time? Does a version
that an island has adopted ever go back, is anything merged twice, are tokens lost?

A kill may come while the standby is not in step, or in the middle of a take-over. A
leader that was killed before it had recovered from the kill before is counted as such.
*In step* are kills at which the mandate named the other one. The *gap* is the time from
a kill to the next merge; the mandate ends 1.0 to 1.25 of its lengths after a kill.

Prediction: somebody leads again whenever there is time; without a loss if the standby
was in step, with a new term if it was not and the killed one did not come back in time.

Command: `python -m benchmarks.coordinator_kills --standby --kills 100`. Cost: 15 s a
kill.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import reliability
import soak
import support
import tape_checks
from coordinator_pair import NODES, Pair, other

from diloco_jax.cluster.processes import last_error
from diloco_jax.config import Config
from diloco_jax.config.resolving import resolve
from diloco_jax.errors import EXIT_CONFIG

GAP_S = (4.0, 20.0)
AGAIN_S = 4.0
"""A kill that finds nobody leading is put off by up to so long."""
BUDGET_S = 4.0
AWAY_S = (0.0, 2 * BUDGET_S)
"""Time after which the killed one is started again."""
TAIL_S = 40.0
"""Seconds of training after the last kill."""
END_S = 300.0
POLL_S = 0.05

Records = Sequence[dict[str, Any]]
Versions = dict[int, list[int]]
"""The newest version by fragment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill."""

    time: float
    who: str
    in_step: bool
    reign: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """Facts that the tape of one leader has."""

    recoveries: tuple[float, ...]
    merges: tuple[float, ...]
    newest: Versions
    adopted: Versions
    problems: tuple[str, ...]

    @classmethod
    def at(cls, tape: Records) -> Look:
        """Read a tape."""
        newest: Versions = {}
        adopted: Versions = {}
        for record in tape:
            if record["kind"] in ("term", "recovered"):
                for fragment, version in enumerate(record["versions"]):
                    _raise(newest, fragment, version)
            elif record["kind"] == "merged":
                _raise(newest, record["fragment"], record["version"])
            elif record["kind"] == "island" and record["record"]["kind"] == "adopted":
                found = record["record"]
                _raise(adopted, found["fragment"], found["version"])
        return cls(
            recoveries=_times(tape, "recovered", "term"),
            merges=_times(tape, "merged"),
            newest=newest,
            adopted=adopted,
            problems=tuple(tape_checks.version_problems(tape)),
        )


def measure(options: argparse.Namespace, made: Callable[[float], Config]) -> int:
    """Run it and deliver the results; return 1 if a bound is broken. options: those of
    `coordinator_kills`. made: returns the config of a run of so many seconds."""
    numbers = random.Random(options.schedule_seed)
    gaps = [round(numbers.uniform(*GAP_S), 3) for _ in range(options.kills)]
    with contextlib.ExitStack() as opened:
        folder = options.keep or Path(
            opened.enter_context(tempfile.TemporaryDirectory(prefix="diloco-"))
        )
        folder.mkdir(exist_ok=True)
        config = pair_config(made(sum(gaps) + TAIL_S))
        pair = Pair(config, folder)
        print(f"{options.kills} kills in {sum(gaps):.0f} s", file=sys.stderr)
        strikes = Strikes(pair, gaps, numbers)
        try:
            last = strikes.run()
            tape, summary = pair.tape(last), pair.summary(last)
        finally:
            pair.close()
        sizes = support.fragment_sizes(pair.config)
    kills, looks = strikes.kills, [*strikes.looks, Look.at(tape)]
    reigns = [*(kill.reign for kill in kills), strikes.reign]
    found = outcomes(kills, looks, config.placement.deadlines.mandate_s)
    facts = facts_of(found, reigns, summary, strikes.ended)
    rows = [] if summary["term"] > 1 else tape_checks.row_problems(tape)
    joins = [f"{n}: {i['joins']}" for n, i in summary["islands"].items()]
    checks = [
        support.at_least("kills that met a leader", len(kills), options.kills, "d"),
        support.at_least("recovered after the last kill", found[-1].recovered, 1, "d"),
        support.none_of("versions", going_back(looks)),
        support.none_of("ledger", tape_checks.ledger_problems(summary, tape, sizes)),
        support.none_of("rows of the data, in one term", rows),
        support.none_of(
            "coordinators that could not start",
            [told for told in strikes.ended if f" {EXIT_CONFIG}: " in told],
        ),
        support.none_of(
            "islands that joined again", [j for j in joins if not j.endswith(": 1")]
        ),
    ]
    return reliability.deliver(
        options,
        "standby_kills",
        __doc__,
        {"The run": [facts], "Kills": list(gap_rows(found))},
        checks,
        {
            "outcomes": [dataclasses.asdict(o) for o in found],
            "facts": facts,
            "ended": strikes.ended,
        },
    )


def pair_config(config: Config) -> Config:
    """Return the config, resolved, with the time budget of the pair."""
    placement = dataclasses.replace(config.placement, time_budget_s=BUDGET_S)
    config = dataclasses.replace(config, placement=placement)
    return resolve(config, text_is_here=True)


class Strikes:
    """The run under kills, and the supervisor of its coordinators."""

    def __init__(
        self, pair: Pair, gaps: Sequence[float], numbers: random.Random
    ) -> None:
        self.kills: list[Kill] = []
        self.looks: list[Look] = []
        """The tape of each leader that was killed, at that moment."""
        self.ended: list[str] = []
        """Coordinators that ended by themselves, not well."""
        self.reign = 0
        """The last reign."""
        self._pair, self._gaps, self._numbers = pair, list(gaps), numbers
        self._starts: dict[str, float] = {}

    def run(self) -> str:
        """Return the coordinator that led at the end of the run."""
        pair = self._pair
        pair.start("one", "--init")
        pair.start("two", "--standby-of", pair.addresses["one"])
        pair.start_islands()
        deadline = time.monotonic() + soak.START_S
        while not any(r["kind"] == "merged" for r in pair.tape("one")):
            self._tend(deadline, "no merge")
            time.sleep(1.0)
        due = time.monotonic()
        deadline = due + 2 * sum(self._gaps) + END_S
        for gap in self._gaps:
            due = max(due + gap, time.monotonic())
            while not self._strike(due):
                self._tend(deadline, f"only {len(self.kills)} kills")
                if time.monotonic() > due:
                    due += self._numbers.uniform(0.0, AGAIN_S)
                time.sleep(POLL_S)
        while self._tend(deadline, "the run does not end"):
            time.sleep(POLL_S)
        mandate = pair.mandate()
        assert mandate is not None
        self.reign = mandate.reign
        return pair.named(mandate.holder)

    def _strike(self, due: float) -> bool:
        """Kill whoever leads, if it is time; return True if there was somebody."""
        pair, mandate = self._pair, self._pair.mandate()
        if time.monotonic() < due or mandate is None:
            return False
        leader = pair.named(mandate.holder)
        if leader in self._starts or pair.running[leader].poll() is not None:
            return False
        pair.running[leader].kill()
        at = time.time()
        pair.running[leader].wait()
        away_s = self._numbers.uniform(*AWAY_S)
        self._starts[leader] = time.monotonic() + away_s
        in_step = pair.named(mandate.in_step) == other(leader)
        self.kills.append(
            Kill(time=at, who=leader, in_step=in_step, reign=mandate.reign)
        )
        self.looks.append(Look.at(pair.tape(leader)))
        return True

    def _tend(self, deadline: float, what: str) -> bool:
        """Start the coordinators again that are due; return False once all processes
        have ended well. Raises RunError if that cannot be, or after the deadline."""
        pair, now = self._pair, time.monotonic()
        codes = {name: process.poll() for name, process in pair.running.items()}
        for name in NODES:
            if name in self._starts:
                if now < self._starts[name]:
                    continue
                del self._starts[name]
            elif codes[name]:
                told = last_error(pair.folder / f"{name}.log")
                self.ended.append(f"{name} ended with {codes[name]}: {told}")
            else:
                continue
            pair.start(name, "--standby-of", pair.addresses[other(name)])
            codes[name] = None
        lost = [name for name in pair.config.islands if codes[name]]
        if lost or now > deadline:
            who = lost or NODES
            tails = "\n".join(f"{n}:\n{pair.log(n)[-2000:]}" for n in who)
            raise support.RunError(f"{what}; islands that ended: {lost}\n{tails}")
        return any(code != 0 for code in codes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one kill. gap: until the next merge, in lengths of the mandate."""

    kill: Kill
    recovered: bool
    gap: float


def outcomes(
    kills: Sequence[Kill], looks: Iterable[Look], mandate_s: float
) -> list[Outcome]:
    """Return what became of each kill, by the tapes of all leaders."""
    looks = list(looks)
    recoveries = {at for look in looks for at in look.recoveries}
    merges = {at for look in looks for at in look.merges}
    ends = [*(kill.time for kill in kills[1:]), math.inf]
    return [
        Outcome(
            kill=kill,
            recovered=any(kill.time < at <= end for at in recoveries),
            gap=(
                min((m for m in merges if m > kill.time), default=math.inf) - kill.time
            )
            / mandate_s,
        )
        for kill, end in zip(kills, ends, strict=True)
    ]


def going_back(looks: Sequence[Look]) -> list[str]:
    """Return versions that go back, on one tape or from one leader to the next."""
    wrong = [problem for look in looks for problem in look.problems]
    seen: Versions = {}
    for number, look in enumerate(looks):
        for fragment, version in seen.items():
            if look.newest and look.newest.get(fragment, [1, 0]) < version:
                wrong.append(
                    f"leader {number}: fragment {fragment} is at "
                    f"{look.newest.get(fragment)}, and {version} was adopted"
                )
        for fragment, version in look.adopted.items():
            _raise(seen, fragment, version)
    return wrong


def facts_of(
    found: Sequence[Outcome],
    reigns: Sequence[int],
    summary: dict[str, Any],
    ended: Sequence[str],
) -> dict[str, Any]:
    """Return the figures of the run."""
    recovered = sum(outcome.recovered for outcome in found)
    lost: collections.Counter[str] = collections.Counter()
    for island in summary["islands"].values():
        lost.update(island["tokens_lost"])
    took = [b > a for a, b in itertools.pairwise(reigns)]
    return {
        "kills": len(found),
        "recovered": recovered,
        "killed before it had recovered": len(found) - recovered,
        "the other one took over": sum(took),
        "terms": summary["term"],
        "ended by itself": len(ended),
        "merges": summary["merges"],
        "tokens lost": sum(lost.values()),
        "goodput": f"{summary['goodput']:.3f}",
    }


def gap_rows(found: Sequence[Outcome]) -> Iterable[dict[str, Any]]:
    """Yield a row for kills with the standby in step, and one for the others."""
    for in_step in (True, False):
        gaps = [o.gap for o in found if o.kill.in_step == in_step]
        yield {
            "standby": "in step" if in_step else "not in step",
            "kills": len(gaps),
            "gap, mandates: median": f"{statistics.median(gaps):.2f}" if gaps else "",
            "longest": f"{max(gaps):.2f}" if gaps else "",
        }


def _times(tape: Records, *kinds: str) -> tuple[float, ...]:
    return tuple(record["time"] for record in tape if record["kind"] in kinds)


def _raise(versions: Versions, fragment: int, version: Sequence[int]) -> None:
    versions[fragment] = max(versions.get(fragment, [0, 0]), list(version))
