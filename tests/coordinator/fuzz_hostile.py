"""Hostile islands: they alter what honest ones would say."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from door_support import ADMITTED, LAYOUTS, RUN, STEP_S, hello_fields, raw
from fuzz_steady import FIRST, Steady, chunked
from fuzz_support import UNIX, Move, World, carried
from numbers_said import numbers_of

from diloco_jax.protocol import messages
from diloco_jax.wire import bulk

EDGES = (-1, 0, 1, 2, 63, 2**16, 2**24, 2**31, 2**40, 2**47, 2**48, 2**48 + 1, 2**53)
HUGE = (2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), FIRST, FIRST + 10**6)
FLOATS = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e-9, 1e-4, 1e9, 1e10, 1e300)
LARGEST = {
    name: most
    for kind in (messages.Hello, messages.Report, messages.Goodbye, bulk.UploadStart)
    for _, name, most in numbers_of(kind)
}
"""The largest number that each field may have, by its name."""
TEXTS = (
    "",
    "x" * 2000,
    "../../x",
    "a\nERROR",
    "coordinator",
    "a",
    "b",
    "\x00",
    "é" * 70,
)
PHASES = ("joining", "compiling", "training", "stopped")
KINDS = ("took", "adopted", "reopened", "dropped", "reset", "carried", "granted")
OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: [],
    lambda: {},
    lambda: True,
    lambda: b"x",
    lambda: msgspec.msgpack.Ext(5, b"x"),
    lambda: [[[[]]]],
    lambda: {"a": {"b": [1]}},
)
CHOICES = (
    *("report",) * 30,
    *("take",) * 14,
    *("hello",) * 12,
    *("upload",) * 8,
    *("fetch",) * 6,
    *("replay",) * 6,
    *("cut",) * 3,
    *("noise",) * 3,
    *("goodbye",) * 2,
    *("second hello",) * 1,
    *("ask",) * 1,
)
HISTORY = 200


class Hostile:
    """Islands that say what honest ones would say, altered; under one seed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.holds_up = seed % 3 == 1
        """True if they make others wait for as long as they can."""
        self.said: list[Move] = []
        self.incarnations = dict.fromkeys((*ADMITTED, "d"), FIRST)
        self.sessions = {name: f"{name}-0" for name in self.incarnations}
        self.sessions[Steady.name] = f"{Steady.name}.{FIRST}"  # As if it had leaked.
        self.seqs = dict.fromkeys(self.incarnations, 0)

    def moves(self) -> list[Move]:
        """One message, of one of them."""
        chance = self.random
        name = chance.choice("bbbccd")
        moves = self._plain(name, chance.choice(CHOICES))
        if chance.random() < 0.6:
            at = chance.randrange(len(moves)) if moves else 0
            moves = [self._altered(m) if i == at else m for i, m in enumerate(moves)]
        if chance.random() < 0.02:
            # After the longer ones all leases have ended, and a reunion is waited for.
            seconds = chance.choice((0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 70.0, 500.0))
            moves.append(Move("wait", seconds=seconds * (chance.random() < 0.5)))
        self.said += moves
        del self.said[:-HISTORY]
        return moves

    def _plain(self, name: str, choice: str) -> list[Move]:
        chance = self.random
        if choice == "cut":
            return [Move("cut", name)]
        if choice == "ask":
            return [Move("ask", name)]
        if choice == "replay" and self.said:
            return [chance.choice(self.said)]
        if choice == "noise":
            junk = chance.randbytes(chance.choice((0, 1, 20, 300)))
            return [Move(chance.choice(("say", "upload", "fetch")), name, (junk,))]
        if choice == "fetch":
            return [Move("fetch", name, (raw("FetchRequest", self._fetch(name)),))]
        if choice == "upload":
            return [self._upload(name, chance.randrange(2), chance.randrange(40), {})]
        hello = Move("say", name, (raw("Hello", self._hello(name)),), True)
        if choice == "hello":
            return [hello]
        if choice == "second hello":
            return [hello._replace(fresh=False)]
        before = [] if name in self.world.streams else [hello]
        if choice == "goodbye":
            reason = chance.choice(("stopped", "preempted", "failed", "finished"))
            goodbye = raw("Goodbye", {"reason": reason, "text": "it leaves"})
            return [*before, Move("say", name, (goodbye,))]
        if choice == "take":
            return [*before, *self._takes(name)]
        report = raw("Report", self._report(name, chance.randrange(3)))
        return [*before, Move("say", name, (report,))]

    def _known(self, name: str) -> Any:
        island = self.world.state.islands.get(name)
        return None if island is None or island.status == "gone" else island

    def _hello(self, name: str) -> dict[str, Any]:
        known = self.world.state.islands.get(name)
        if (known is not None and known.status == "gone") or self.random.random() < 0.1:
            self.incarnations[name] += 1
            self.sessions[name] = f"{name}-{self.incarnations[name]}"
        current = self._known(name)
        version = tuple(self.world.state.fragments[0].version)
        offers = self.world.coordinator is None
        # Of another config or run, often: no single offer ends a gathering.
        unfit = offers and self.random.random() < 0.3
        run_id = "another" if unfit and name == "b" else "r"
        return hello_fields(
            name,
            run_id=run_id if offers else "",
            fingerprint="x" if unfit and name == "c" else RUN.fingerprint(),
            incarnation=self.incarnations[name],
            session=self.sessions[name],
            steps=current.steps if current else 0,
            sequences_granted=current.sequences_granted if current else 0,
            records_through=current.records_through if current else 0,
            term=1 if offers else 0,
            versions=[version] * 2 if offers else [],
            own_tokens=self.random.randrange(100),
            next_position=self.world.state.next_position,
            lookahead=LARGEST["lookahead"]
            if self.holds_up
            else self.random.randrange(3),
        )

    def _report(self, name: str, records: int = 0) -> dict[str, Any]:
        known = self._known(name)
        steps = (known.steps if known else 0) + self.random.randrange(4)
        measures = {"steps": steps, "median_step_seconds": STEP_S, "loss": 2.0}
        measures |= {"eval_loss": math.nan, "bytes_up": 9, "first_step_unix": UNIX}
        return {
            "phase": self.random.choice(("training",) * 5 + PHASES),
            "steps": steps,
            "step_seconds": STEP_S,
            "records": [self._record(name, steps) for _ in range(records)],
            "measures": measures,
        }

    def _record(self, name: str, step: int) -> dict[str, Any]:
        known, chance = self._known(name), self.random
        self.seqs[name] = 1 + max(
            self.seqs[name], known.records_through if known else 0
        )
        fragment = chance.randrange(2)
        books = self.world.state.fragments[fragment].accounts.get(name)
        tick = books.take.tick if books and books.take else chance.randrange(20)
        return {
            "seq": self.seqs[name],
            "kind": chance.choice(KINDS),
            "step": step,
            "fragment": fragment,
            "tick": tick,
            "version": tuple(self.world.state.fragments[fragment].version),
            "start": books.start if books else 0,
            "stop": step,
            "value": 0,
        }

    def _takes(self, name: str) -> list[Move]:
        """Do what it was asked for."""
        fields, uploads = self._report(name), []
        fields["steps"] += 1
        for fragment in self.world.state.fragments:
            books = fragment.accounts.get(name)
            if books is None or books.take is None:
                continue
            record = self._record(name, fields["steps"])
            record |= {"kind": "took", "fragment": fragment.index}
            record |= {"tick": books.take.tick, "start": books.start}
            record["version"] = tuple(fragment.version)
            fields["records"].append(record)
            uploads.append(self._upload(name, fragment.index, books.take.tick, {}))
        return [Move("say", name, (raw("Report", fields),)), *uploads]

    def _identity(self, name: str) -> dict[str, Any]:
        return {
            "run_id": "r",
            "island": name,
            "incarnation": self.incarnations[name],
            "session": self.sessions[name],
        }

    def _upload(
        self, name: str, fragment: int, tick: int, more: dict[str, Any]
    ) -> Move:
        total = LAYOUTS[fragment].total_bytes
        fill = self.random.choice((0.0, 0.0, 1e-3, 1e30, math.nan, math.inf))
        data = np.full(total // 4, fill, np.float32).tobytes()
        begin = self.random.choice((0, 0, 0, total // 2))
        stop = (
            self.random.choice((total, total, total, total // 2))
            if not begin
            else total
        )
        fields = {"fragment": fragment, "tick": tick, "offset": begin, "part": []}
        fields |= {"length": stop - begin, "total": total, "version": None, **more}
        if self.world.coordinator is None:
            fields["version"] = [1, 0]
        start = raw("UploadStart", {**self._identity(name), **fields})
        return Move("upload", name, (start, *chunked(data[begin:stop], begin)))

    def _fetch(self, name: str) -> dict[str, Any]:
        fragment = self.random.randrange(2)
        version = self.world.state.fragments[fragment].version
        fields = {"fragment": fragment, "want": tuple(version), "have": None}
        if version.number and self.random.random() < 0.5:
            fields["have"] = (version.term, version.number - 1)
        return {**self._identity(name), **fields, "offset": 0, "length": -1, "part": []}

    def _altered(self, move: Move) -> Move:
        if not move.frames:
            return move
        chance = self.random
        if move.kind in ("upload", "fetch") and chance.random() < 0.2:
            # Anywhere in what the connection carries, headers included.
            return Move("bulk", move.who, (self._damaged(carried(move)),))
        if chance.random() < 0.2:
            at = chance.randrange(len(move.frames))
            damaged = (*move.frames[:at], self._damaged(move.frames[at]))
            return move._replace(frames=(*damaged, *move.frames[at + 1 :]))
        fields = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            fields = msgspec.msgpack.decode(move.frames[0])
        if not isinstance(fields, dict) or not fields:
            return move
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            self._alter(fields)
        return move._replace(frames=(msgspec.msgpack.encode(fields), *move.frames[1:]))

    def _damaged(self, octets: bytes) -> bytes:
        chance = self.random
        at = chance.randrange(len(octets) + 1)
        match chance.randrange(4):
            case 0:
                return octets[:at]
            case 1:
                return octets + chance.randbytes(3)
            case 2:
                return octets[:at] + chance.randbytes(1) + octets[at + 1 :]
            case _:
                return octets[:at] + octets

    def _alter(self, fields: dict[str, Any]) -> None:
        chance = self.random
        # Not inside the run's fields, which are many and all compared as a whole.
        all_paths = [p for p in paths(fields) if p[0] != "run" or len(p) == 1]
        path = chance.choice(all_paths or [("type",)])
        parent: Any = fields
        for key in path[:-1]:
            parent = parent[key]
        key, value = path[-1], parent[path[-1]] if all_paths else None
        if all_paths and chance.random() < 0.08:
            del parent[key]
        else:
            parent[key] = self._odd(key, value)

    def _odd(self, key: Any, value: Any) -> Any:
        chance = self.random
        if chance.random() < 0.1:
            return chance.choice(OTHERS)()
        if key in LARGEST and chance.random() < 0.3:
            return LARGEST[key]
        if isinstance(value, bool) or value is None:
            return chance.choice((True, None, [1, 0], [1, 2**48], 3))
        if isinstance(value, int):
            near = value + chance.choice((-2, -1, 1, 2, 5, 100))
            odd = chance.choice((near, near, chance.choice(EDGES), chance.choice(HUGE)))
            return max(-(2**63), min(odd, 2**64 - 1))
        if isinstance(value, float):
            return chance.choice((*FLOATS, chance.choice(EDGES)))
        if isinstance(value, str):
            known = {
                "phase": PHASES,
                "kind": KINDS,
                "session": tuple(self.sessions.values()),
            }
            return chance.choice((*known.get(key, ()), chance.choice(TEXTS)))
        if isinstance(value, list) and value:
            return chance.choice((value * 2, value[1:], value * 700, [value]))
        if isinstance(value, list):
            if key == "part":
                return [[0, [0, 0], [1, 1]]] * chance.choice((1, 2))
            return chance.choice(
                ([[1, 0]], [[1, 1], [1, 2]], [0], [[2**20, 2**48]] * 2)
            )
        return value


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values inside a decoded message, the inner ones last."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*before, key)
        yield from paths(inner, (*before, key))
