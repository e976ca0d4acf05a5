"""`diloco chaos HOST:PORT`: strikes on a run wherever it is, which its own processes
carry out; `placement.chaos` lets them in. What they cost is seen in the run's status.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from diloco_jax.chaos import measure
from diloco_jax.chaos.options import ChaosOptions, RemoteChaosOptions
from diloco_jax.chaos.schedule import Strike, of_options, write_schedule
from diloco_jax.cluster.steer_commands import operator_at
from diloco_jax.config import Placement
from diloco_jax.errors import EXIT_DONE, ConfigError
from diloco_jax.faults import COORDINATOR
from diloco_jax.protocol.coordinator import striking
from diloco_jax.protocol.messages import StrikeOrder
from diloco_jax.wire.errors import Busy, ConnectionLost, Refused, WireError

KINDS = ("kill", "stop")
LOOK_S, SETTLE_S = 0.5, 60.0
"""Seconds between two looks at the status, and after the last strike."""
TRAINING = "training"


class StruckRun(Protocol):
    """Calls of `wire.Client`."""

    def status(self, timeout_s: float) -> dict[str, Any]:
        """See `Client.status`."""

    def strike(self, order: StrikeOrder, timeout_s: float) -> dict[str, Any]:
        """See `Client.strike`."""


def strike_remote(
    target: str, console: Console, options: RemoteChaosOptions
) -> tuple[int, dict[str, Any]]:
    """Strike the run at HOST:PORT, from now on; return the exit code and the report.

    Raises ConfigError for strikes that only a run of this machine can have, and Refused
    if the run lets nobody strike it.
    """
    placement = Placement(certificates=options.certificates, insecure=options.insecure)
    with operator_at(target, placement) as (client, patience_s):
        islands = tuple(client.status(patience_s)["islands"])
        strikes = _scheduled(islands, options)
        if options.save_schedule:
            write_schedule(map(str, strikes), Path(options.save_schedule))

        def say(text: str) -> None:
            console.print(f"strike: {text}", highlight=False)

        watch = CostWatch(client, patience_s)
        carry_out(strikes, client, patience_s, watch, say)
    found = watch.outcomes()
    head, *rows = measure.rows(found)
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    findings = {
        "planned": [*map(str, strikes)],
        "outcomes": [dataclasses.asdict(outcome) for outcome in found],
        "goodput": watch.last.get("goodput"),
    }
    return EXIT_DONE, findings


def carry_out(
    strikes: Sequence[Strike],
    client: StruckRun,
    patience_s: float,
    watch: CostWatch,
    say: Callable[[str], None],
    *,
    settle_s: float = SETTLE_S,
    look_s: float = LOOK_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Give the orders at their times; look at the status meanwhile, and afterwards
    until every cost is known or `settle_s` is over. A strike that meets nobody, as an
    island that is not back from the last one, is left out."""
    began = clock()

    def wait(until: float) -> None:
        while (left := until - clock()) > 0:
            sleep(min(look_s, left))
            watch.look(clock())

    for strike in strikes:
        wait(began + strike.at_s)
        for name in strike.who:
            order = StrikeOrder(
                who=None if name == COORDINATOR else name,
                kind="kill" if strike.kind == "kill" else "stop",
                seconds=strike.seconds,
            )
            try:
                client.strike(order, patience_s)
            except ConnectionLost as error:
                say(f"{strike}: the coordinator is not reached ({error})")
                continue
            except (Refused, Busy) as error:
                if isinstance(error, Refused) and error.code == striking.NEVER:
                    raise
                say(f"{strike}: {name} is not struck ({error})")
                continue
            watch.struck(name, strike, clock())
            say(str(strike))
    settled = clock() + max((s.seconds for s in strikes), default=0.0) + settle_s
    while not watch.done and clock() < settled:
        wait(min(clock() + look_s, settled))


class CostWatch:
    """Learns from the run's status what strikes cost, to within a look's interval."""

    def __init__(self, client: StruckRun, patience_s: float) -> None:
        self._client, self._patience_s = client, patience_s
        self.last: Mapping[str, Any] = client.status(patience_s)
        """The last status."""
        self._open: list[_Struck] = []
        self._all: list[_Struck] = []

    @property
    def done(self) -> bool:
        """True if every strike's cost is known."""
        return not self._open

    def struck(self, name: str, strike: Strike, now: float) -> None:
        """Note a strike. What another one there had yet to show is never known."""
        self._open = [s for s in self._open if s.name != name]
        made = _Struck(name, strike, now, time.time(), _of(self.last, name))
        self._open.append(made)
        self._all.append(made)

    def look(self, now: float) -> None:
        """Look at the status, if there is one."""
        try:
            self.last = status = self._client.status(self._patience_s)
        except WireError:
            status = {}
        for struck in self._open:
            struck.see(_of(status, struck.name), now)
        self._open = [s for s in self._open if s.merged_s is None]

    def outcomes(self) -> list[measure.StrikeOutcome]:
        """Return what is known."""
        return [
            measure.StrikeOutcome(
                who=s.name,
                kind=s.strike.kind,
                time=s.time,
                seconds=s.strike.seconds,
                detected_s=s.detected_s,
                back_s=s.back_s,
                merged_s=s.merged_s,
                tokens_lost=s.tokens_lost,
            )
            for s in self._all
        ]


class _View:
    """The part of the status about an island, or about the run for the coordinator."""

    def __init__(self, part: Mapping[str, Any], state: str, life: Any) -> None:
        self.state, self.life = state, life
        self.merged: int = part["tokens_merged"]
        self.lost: int = sum(part.get("tokens_lost", {}).values())


def _of(status: Mapping[str, Any], name: str) -> _View | None:
    """Return the view of a name; None if it is not there."""
    if name == COORDINATOR:
        return _View(status, TRAINING, None) if status else None
    part = status.get("islands", {}).get(name)
    return part and _View(part, part["state"], part["incarnation"])


class _Struck:
    """One strike, and what is known of its cost."""

    def __init__(
        self, name: str, strike: Strike, now: float, at: float, before: _View | None
    ) -> None:
        self.name, self.strike, self.time = name, strike, at
        self.detected_s: float | None = None
        self.back_s: float | None = None
        self.merged_s: float | None = None
        self.tokens_lost = 0
        self._began, self._before = now, before
        self._merged_at_return: int | None = None

    def see(self, view: _View | None, now: float) -> None:
        """Look at it now."""
        passed_s = now - self._began
        before = self._before
        changed = view is None or before is None or view.life != before.life
        away = view is None or view.state != TRAINING
        if self.detected_s is None and (changed or away):
            self.detected_s = passed_s
        unnoticed = self.strike.kind == "kill" and self.detected_s is None
        if away or unnoticed or passed_s < self.strike.seconds:
            return
        assert view is not None
        if self._merged_at_return is None:
            self._merged_at_return = view.merged
            if self.detected_s is not None:
                self.back_s = passed_s
        elif view.merged > self._merged_at_return:
            self.merged_s = passed_s
            if before is not None:
                self.tokens_lost = max(0, view.lost - before.lost)


def _scheduled(islands: Sequence[str], options: ChaosOptions) -> tuple[Strike, ...]:
    strikes, faults = of_options(options, islands)
    others = [*faults, *(str(s) for s in strikes if s.kind not in KINDS)]
    others += ["--twin"] * options.twin
    if options.link_bytes_per_s:
        others.append("--link-bytes-per-s")
    if others:
        raise ConfigError(
            f"{', '.join(others)}: a run at HOST:PORT strikes itself, by "
            f"{' and '.join(KINDS)}; for all else run its config with diloco chaos"
        )
    return strikes
