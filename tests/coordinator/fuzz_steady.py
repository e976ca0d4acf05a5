"""An honest island: the product's own half in virtual time, whose words are bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from door_support import ADMITTED, CONFIG, LAYOUTS, PLAN, RUN, SHARED, STEP_S, raw
from fuzz_support import START, UNIX, Move, World
from msgspec.structs import replace

from diloco_jax.config import Placement
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.core.tiles import TileGrid, ballot_of
from diloco_jax.protocol.coordinator.state import Said
from diloco_jax.protocol.island.reporting import Introduction
from diloco_jax.protocol.messages import (
    AnchorRequest,
    DeltaKey,
    FromCoordinator,
    Hello,
    Published,
    Refused,
    TakeVerdict,
    Version,
    Welcome,
)
from diloco_jax.simulation.clock import Clock, Line, LineSpeed
from diloco_jax.simulation.island import IslandSpec, NoBody, VirtualFetch, VirtualIsland
from diloco_jax.wire import bulk

FIRST = int(UNIX)
"""The first incarnation, counted as launchers do."""
BEFORE = (Version(1, 3), Version(1, 2))
"""What it has of a run whose coordinator lost its state."""
LONGEST_S = 1.0
"""Most of its time between two turns while it makes steps: it makes up for no wait."""


class Island(VirtualIsland):
    """One incarnation, which knows its model, and sends anchors."""

    def __init__(self, steady: Steady, incarnation: int) -> None:
        self._steady = steady
        batch_size, total = ADMITTED[steady.name], steady.world.scenario.total_tokens
        assert batch_size is not None
        super().__init__(
            IslandSpec(
                name=steady.name, batch_size=batch_size, step_seconds=lambda _: STEP_S
            ),
            incarnation,
            dataclasses.replace(RUN, total_tokens=total),
            steady.clock,
            NoBody(),
            Placement().deadlines.report_s,
        )

    def _hello(self, who: Introduction) -> Hello:
        return super()._hello(replace(who, plan=PLAN.digest(), run=SHARED))

    def send_anchor(self, asked: AnchorRequest) -> None:
        self._steady.anchor(asked.fragment, asked.sample)


class Steady:
    """An island that does what islands do; to its processes, the coordinator."""

    name, config = "a", CONFIG

    def __init__(self, world: World) -> None:
        self.world, self.clock, self._seen = world, Clock(START), world.now
        self.refusals: list[Refused] = []
        self._merged: set[tuple[int, int]] = set()
        self._said: list[Move] = []
        self._over, self.serves = False, True
        self.island = Island(self, FIRST)
        if world.scenario.gathers:
            self._connect()
            welcome = Welcome(run_id="r", term=1, resumed=False, versions=BEFORE)
            self.island.received(welcome)
            self.clock.run(START)

    @property
    def merged(self) -> int:
        """Takes of its that were merged."""
        return len(self._merged)

    def moves(self) -> list[Move]:
        """Its next words, all of which follow from what it has heard."""
        self._said, self.serves = [], self.world.coordinator is not None
        heard = self.world.heard.pop(self.name, [])
        try:
            for message in heard:
                self._hear(message)
        except ValueError:  # A grant is missing: another has come with its session.
            return [Move("cut", self.name)]
        if not self._over and self.name not in self.world.streams:
            self._connect()
        passed_s, self._seen = self.world.now - self._seen, self.world.now
        most_s = LONGEST_S if self.serves else passed_s
        self.clock.run(self.clock.now + min(passed_s, most_s))
        return self._said

    def _connect(self) -> None:
        self.island.disconnect()
        self.island.connect(self, Line(self.clock, LineSpeed()))

    def _hear(self, message: FromCoordinator) -> None:
        match message:
            case Refused():
                self.refusals.append(message)
                self.island.die("refused")
                self._over = message.code == "finished"
                self.island = Island(self, self.island.incarnation + 1)
                return
            case Published(verdict=TakeVerdict(verdict="merged") as verdict):
                self._merged.add((verdict.fragment, verdict.tick))
            case TakeVerdict(verdict="merged"):
                self._merged.add((message.fragment, message.tick))
        self.island.received(message)

    # ---- what its processes say and fetch -------------------------------------------

    def hello(self, hello: Hello, peer: object) -> None:
        self._said.append(Move("say", self.name, (bulk.encode(hello),), True))

    def hear(self, event: Any) -> None:
        assert isinstance(event, Said)
        self._said.append(Move("say", self.name, (bulk.encode(event.message),)))

    def arrived(self, key: DeltaKey, encoded: object) -> None:
        values = np.full(LAYOUTS[key.fragment].total_bytes // 4, 1e-3, np.float32)
        self._upload(values.tobytes(), fragment=key.fragment, tick=key.tick)

    def fetch(self, fragment: int, want: Version, have: object) -> VirtualFetch:
        return VirtualFetch(want, 0, None)

    def anchor(self, fragment: int, sample: int) -> None:
        """All of it is 0; or a ballot of it."""
        pieces = PLAN.fragments[fragment]
        sent = bytes(4 * sum(math.prod(piece.shape) for piece in pieces))
        if sample:
            grids = [TileGrid.of(piece.shape) for piece in pieces]
            tiles = [np.zeros((*g.grid, g.elements), np.float32) for g in grids]
            layout = PayloadLayout.of_ballots(pieces)
            sent = bytes(layout.pack([ballot_of(each, sample) for each in tiles]))
        version = self.island._conversation.status().versions[fragment]
        of = {"version": tuple(version), "sample": sample}
        self._upload(sent, fragment=fragment, tick=-1, **of)

    def _upload(self, data: bytes, **of: Any) -> None:
        who = self.island
        fields = {"run_id": "r", "island": self.name, "incarnation": who.incarnation}
        fields |= {"session": who.session, "offset": 0, "length": len(data), **of}
        start = raw("UploadStart", {**fields, "total": len(data)})
        self._said.append(Move("upload", self.name, (start, *chunked(data))))


def chunked(data: bytes, begin: int = 0) -> tuple[bytes, ...]:
    """The chunks of a stripe that begins there, as they are sent."""
    cut = bulk.chunks((data,), 0, len(data), begin)
    return tuple(header + part for header, part in cut)
