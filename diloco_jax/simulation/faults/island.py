"""An island of a fault schedule: it may die, and invariants watch it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from diloco_jax.config import RunConfig
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.messages import AnchorRequest
from diloco_jax.simulation.faults.arrays import Anchor, DigestBody
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.gatherer import VirtualGatherer
from diloco_jax.simulation.faults.invariants import Monitor
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.island import (
    Connection,
    IslandSpec,
    VirtualIsland,
    VirtualService,
)


class FaultyIsland(VirtualIsland):
    """One incarnation.

    refused: called if the coordinator refuses it or puts it out. postponed: called with
    a connection that the coordinator ends so that the island comes again.
    """

    def __init__(
        self,
        spec: IslandSpec,
        incarnation: int,
        run: RunConfig,
        clock: Clock,
        report_s: float,
        monitor: Monitor,
        refused: Callable[[FaultyIsland], None],
        postponed: Callable[[Connection], None],
    ) -> None:
        self.who = (spec.name, incarnation)
        self.body = DigestBody(
            ADOPT_RULES.find(run.sync.adopt),
            run.inner.learning_rate,
            functools.partial(self._seen, monitor.adopted),
            functools.partial(self._seen, monitor.trained),
        )
        self.takes: Counter[int] = Counter()
        """Takes by fragment."""
        self._anchors: dict[int, Anchor] = {}
        """The anchor that was sent last, by lost fragment."""
        self._monitor, self._refused, self._postponed = monitor, refused, postponed
        super().__init__(spec, incarnation, run, clock, self.body, report_s)

    @property
    def service(self) -> VirtualService | None:
        """The service to which it was connected last."""
        return self._coordinator

    def put(self, fragment: int, tick: int, encoded: Any) -> None:
        assert self.boundary is not None
        self.takes[fragment] += 1
        for take in self.boundary.books.outstanding():
            if take.fragment == fragment:
                self._seen(self._monitor.took, take, encoded)
        super().put(fragment, tick, encoded)

    def send_anchor(self, asked: AnchorRequest) -> None:
        line, to = self.line, self._coordinator
        anchor = self.body.anchor(asked.fragment)
        if line is None:
            return
        if isinstance(to, VirtualGatherer):
            line.upload(0, lambda: to.anchor(self.who, asked.fragment, anchor))
        elif isinstance(to, FaultyCoordinator):
            self._anchors[asked.fragment] = anchor

            def wanted() -> bool:
                newest = self._anchors[asked.fragment] is anchor
                return newest and self.line is line and self.ended is None

            line.upload(0, lambda: to.anchor(self.who, asked, anchor, wanted))

    def turned_away(self, reason: str) -> None:
        super().turned_away(reason)
        self._refused(self)

    def postponed(self, connection: Connection) -> None:
        self._postponed(connection)

    def _seen(
        self, observe: Callable[..., None], *observation: Any, **facts: Any
    ) -> None:
        """Pass an observation on, if its process is in the run."""
        if self._monitor.names.belong_to(self.who, self.session):
            observe(self.who, *observation, **facts)
