"""An honest island: what it says follows from what it has heard."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from door_support import ADMITTED, LAYOUTS, PLAN, STEP_S, hello_fields, raw
from fuzz_support import UNIX, Move, World

from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.core.tiles import TileGrid, ballot_of
from diloco_jax.protocol import messages
from diloco_jax.wire import bulk

FIRST = int(UNIX)
"""The first incarnation, counted as launchers do."""
ANCHOR_BYTES = [4 * sum(math.prod(p.shape) for p in f) for f in PLAN.fragments]


class Steady:
    """An island that does what islands do."""

    name = "a"

    def __init__(self, world: World) -> None:
        self.world = world
        self.incarnation, self.refusals, self.merged = FIRST - 1, [], 0
        self.ended = False
        self._begin()
        if world.scenario.gathers:
            self.run_id, self.term, self.base = "r", 1, [(1, 3), (1, 2)]

    def _begin(self) -> None:
        """A new process."""
        self.incarnation += 1
        self.session = f"steady-{self.incarnation}"
        self.steps, self.granted, self.seq, self.acknowledged = 0, 0, 0, 0
        self.since = self.world.now
        self.start = [0] * len(LAYOUTS)
        self.takes: dict[int, dict[str, int]] = {}
        """By fragment: tick, start, end, seq and base of an outstanding take."""
        self.asked: dict[int, tuple[int, int]] = {}
        """By fragment: tick, and step at which the take is due."""
        self.base: list[tuple[int, int]] = []
        self.records: list[dict[str, Any]] = []
        self.term, self.run_id, self.tokens, self.position = 0, "", 0, 0
        self.own_tokens = 0
        self.held: list[int] = []
        self.phase, self.stale = "training", False

    def moves(self) -> list[Move]:
        """Its next words, all of which follow from what it has heard."""
        said: list[Move] = []
        self._read(said)
        if self.ended:
            return said
        if not self.joined:
            return [*said, Move("say", self.name, (raw("Hello", self.hello()),), True)]
        if not self.term or self.world.coordinator is None:
            report = {"phase": self.phase, "steps": self.steps, "step_seconds": STEP_S}
            return [*said, Move("say", self.name, (raw("Report", report),))]
        batch = ADMITTED[self.name]
        may = self.granted // batch
        if self.phase == "training":
            made = int((self.world.now - self.since) / STEP_S)
            self.steps = max(self.steps, min(may, made))
        uploads = []
        for fragment, (tick, due) in list(self.asked.items()):
            if self.phase == "training" and self.steps < due:
                continue
            if self.steps > self.start[fragment] and fragment not in self.takes:
                uploads.append(self._take(fragment, tick))
                del self.asked[fragment]
        fields = {
            "phase": self.phase,
            "steps": self.steps,
            "step_seconds": STEP_S,
            "records": self.records[:100],
            "measures": {"steps": self.steps, "median_step_seconds": STEP_S},
        }
        return [*said, Move("say", self.name, (raw("Report", fields),)), *uploads]

    @property
    def joined(self) -> bool:
        return self.name in self.world.streams

    def hello(self) -> dict[str, Any]:
        names = ("tick", "start", "end", "seq", "base")
        held = [
            {"fragment": fragment, **{name: take[name] for name in names}}
            for fragment, take in self.takes.items()
        ]
        return hello_fields(
            self.name,
            run_id=self.run_id,
            incarnation=self.incarnation,
            session=self.session,
            phase=self.phase,
            steps=self.steps,
            outstanding=held,
            sequences_granted=self.granted,
            records_through=self.acknowledged,
            term=self.term,
            versions=self.base,
            tokens=self.tokens,
            own_tokens=self.own_tokens,
            next_position=self.position,
        )

    def _take(self, fragment: int, tick: int) -> Move:
        self.seq += 1
        take = {
            "tick": tick,
            "start": self.start[fragment],
            "end": self.steps,
            "seq": self.seq,
            "base": self.base[fragment],
        }
        self.takes[fragment] = take
        record = {"seq": self.seq, "kind": "took", "step": self.steps}
        record |= {"fragment": fragment, "tick": tick, "start": take["start"]}
        self.records.append({**record, "version": take["base"]})
        return self._delta(fragment, tick)

    def _delta(self, fragment: int, tick: int) -> Move:
        total = LAYOUTS[fragment].total_bytes
        values = np.full(total // 4, 1e-3, np.float32)
        fields = {"fragment": fragment, "tick": tick, "offset": 0, "length": total}
        start = raw("UploadStart", {**self.identity(), **fields, "total": total})
        return Move("upload", self.name, (start, *chunked(values.tobytes())))

    def _anchor(self, fragment: int, sample: int) -> Move:
        """All of it is 0; or a ballot of it."""
        sent = bytes(ANCHOR_BYTES[fragment])
        if sample:
            layout = PayloadLayout.of_ballots(PLAN.fragments[fragment])
            grids = [TileGrid.of(placed.piece.shape) for placed in layout.placed]
            tiles = [np.zeros((*g.grid, g.elements), np.float32) for g in grids]
            sent = bytes(layout.pack([ballot_of(each, sample) for each in tiles]))
        total = len(sent)
        fields = {"fragment": fragment, "tick": -1, "offset": 0, "length": total}
        fields |= {"total": total, "version": self.base[fragment], "sample": sample}
        start = raw("UploadStart", {**self.identity(), **fields})
        return Move("upload", self.name, (start, *chunked(sent)))

    def identity(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "island": self.name,
            "incarnation": self.incarnation,
            "session": self.session,
        }

    def _read(self, said: list[Move]) -> None:
        heard = self.world.heard.pop(self.name, [])
        for message in heard:
            match message:
                case messages.Welcome():
                    self._welcomed(message)
                case messages.Refused():
                    self.refusals.append(message)
                    if message.code == "finished":
                        self.ended = True
                        return
                    self._begin()
                case messages.Granted() if message.offset == self.granted:
                    self.granted += message.span.stop - message.span.start
                case messages.TakeRequest():
                    if message.fragment not in self.takes:
                        due = self.steps + message.after
                        tick, before = self.asked.get(message.fragment, (-1, due))
                        if tick == message.tick:
                            due = min(due, before)
                        self.asked[message.fragment] = (message.tick, due)
                case messages.ResendRequest():
                    take = self.takes.get(message.fragment)
                    if take is not None and take["tick"] == message.tick:
                        said.append(self._delta(message.fragment, message.tick))
                case messages.AnchorRequest() if self.base:
                    said.append(self._anchor(message.fragment, message.sample))
                case messages.Published(fragment=fragment, version=version):
                    self.base[fragment] = tuple(version)
                    if message.verdict is not None:
                        self._judged(message.verdict)
                case messages.TakeVerdict():
                    self._judged(message)
                case messages.Progress():
                    self.acknowledged = message.records_through
                    self.tokens, self.position = message.tokens, message.next_position
                    self.own_tokens = message.own_tokens
                    self.records = [
                        r for r in self.records if r["seq"] > self.acknowledged
                    ]
                case messages.Stop():
                    self.phase = "stopped"
                case messages.Finished():
                    self.ended = True

    def _welcomed(self, welcome: messages.Welcome) -> None:
        self.run_id = welcome.run_id
        if not welcome.term:
            return
        if self.term and welcome.term > self.term:
            # The steps of an earlier term are in its books.
            self.takes, self.asked = {}, {}
            self.start = [self.steps] * len(LAYOUTS)
            for fragment in range(len(LAYOUTS)):
                self.seq += 1
                record = {"seq": self.seq, "kind": "carried", "step": self.steps}
                record |= {"fragment": fragment, "start": self.steps}
                self.records.append(record)
        self.term = welcome.term
        self.base = [tuple(version) for version in welcome.versions]

    def _judged(self, said: messages.TakeVerdict) -> None:
        fragment = said.fragment
        take = self.takes.get(fragment)
        if take is None or said.tick != take["tick"]:
            return
        if said.verdict == "merged":
            self.start[fragment] = take["end"]
            self.merged += 1
            del self.takes[fragment]
        elif said.verdict == "refused":
            self.seq += 1
            record = {"seq": self.seq, "kind": "reopened", "step": self.steps}
            record |= {"fragment": fragment, "tick": take["tick"]}
            self.records.append(record)
            del self.takes[fragment]


def chunked(data: bytes, begin: int = 0) -> tuple[bytes, ...]:
    """The chunks of a stripe that begins there, as they are sent."""
    cut = bulk.chunks((data,), 0, len(data), begin)
    return tuple(header + part for header, part in cut)
