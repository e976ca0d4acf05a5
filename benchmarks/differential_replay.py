"""Recorded calls, done again by this checkout's code."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from differential_names import CLASSES, EVENTS, FUNCTIONS, REPLACED, STATES, Call
from differential_record import CODE, CONSTANT, SCHEDULE
from differential_values import (
    code_digest,
    decode,
    encode,
    find,
    found,
    met,
    renamed,
    text,
)

Line = list[Any]
DIFFERENCES_SHOWN = 3


@dataclasses.dataclass(kw_only=True)
class Compared:
    """The result of a comparison. calls, differences, not_compared: counts by name."""

    schedules: int = 0
    events: int = 0
    effects: int = 0
    calls: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    differences: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    not_compared: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    shown: list[str] = dataclasses.field(default_factory=list)
    """The first differences, for people."""

    def differ(self, name: str, what: str) -> None:
        """Count a difference."""
        if self.differences.total() < DIFFERENCES_SHOWN:
            self.shown.append(what)
        self.differences[name] += 1

    @property
    def holds(self) -> bool:
        """Return True if everything that must be compared is compared and equal."""
        missing = self.not_compared.keys() & set(EVENTS)
        return bool(self.events and not missing and not self.differences)

    def __str__(self) -> str:
        lines = [
            *self.shown,
            f"{self.schedules} schedules, {self.events} events, {self.effects} "
            f"effects, {self.calls.total()} calls, "
            f"{self.differences.total()} differences",
        ]
        if self.differences:
            lines.append(f"differences: {dict(self.differences)}")
        if self.not_compared:
            lines.append(f"not compared: {dict(self.not_compared)}")
        return "\n".join(lines)


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a recording."""
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def replay(path: Path) -> Compared:
    """Repeat all recorded calls and compare their results and calls of ports."""
    compared = Compared()
    # A recording of this very code needs no renaming.
    is_own = next(lines(path)) == [CODE, code_digest()]
    replayed = _Schedule(0, compared, is_own=is_own)
    for line in lines(path):
        if line[0] == SCHEDULE:
            compared.schedules += 1
            replayed = _Schedule(line[1], compared, is_own=is_own)
        elif line[0] == CODE:
            continue
        else:
            replayed.play(line)
    return compared


def matched(recorded: Path, here: Path) -> Compared:
    """Compare two recordings: the events of every schedule and their times."""
    compared = Compared()
    streams = zip(_events(recorded), _events(here), strict=True)
    for (seed, before), (_, after) in streams:
        compared.schedules += 1
        compared.events += len(before)
        call = Call("schedule", (), None)
        wanted = [text(renamed(event, call)) for event in before]
        said = [text(met(event, call)) for event in after]
        if wanted != said:
            pairs = itertools.zip_longest(wanted, said, fillvalue="nothing")
            number, pair = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
            what = f"schedule {seed}, event {number}:\n  recorded {pair[0]}\n"
            compared.differ("schedule", f"{what}  here     {pair[1]}")
    return compared


def _events(path: Path) -> Iterator[tuple[int, list[Any]]]:
    """Seed and events of one schedule after the other."""
    seed, events = None, []
    for line in lines(path):
        if line[0] == SCHEDULE:
            if seed is not None:
                yield seed, events
            seed, events = line[1], []
        elif line[0] in EVENTS:
            events.append([line[0], *_given(line[1])])
    if seed is not None:
        yield seed, events


class _Schedule:
    def __init__(self, seed: int, compared: Compared, *, is_own: bool) -> None:
        self._renamed = _as_it_is if is_own else renamed
        self._met = _as_it_is if is_own else met
        self._seed, self._compared = seed, compared
        self._made: list[Any] = []
        """By number of the call; None: by none that was done."""
        kinds = [kind for name in STATES if (kind := find(name)) is not None]
        kinds += [kind for h in CLASSES.values() if (kind := found(h.places))]
        self._results = dict.fromkeys(kinds, self._result)
        self._now: Any = None
        """Objects that the current call has made."""
        self._ports: list[Any] = []

    def play(self, line: Line) -> None:
        """Repeat one call."""
        if line[0] == CONSTANT:
            before = Call(CONSTANT, (), None)
            self._made.append(decode(self._renamed(line[1], before), {}))
            return
        name, recorded, asked, result = line
        compared, number = self._compared, len(self._made)
        self._made.append(None)
        call = Call(name, (), None)
        try:
            args, kwargs = self._decoded(self._renamed(recorded, call))
            function = _function(name, args)
        except _MissingError:
            function = None
        if function is None:
            compared.not_compared[name] += 1
            return
        self._now = None
        ports = self._ports = [[], collections.deque(asked)]
        try:
            returned = function(*args, **kwargs)
        except Exception as error:
            returned = error
        call = Call(name, args, returned)
        found_result = self._met(encode(returned, self._results), call)
        wanted = self._renamed([result, [_asked(*ask[:3]) for ask in asked]], call)
        self._made[number] = self._now
        compared.calls[name] += 1
        if name in EVENTS:
            compared.events += 1
            compared.effects += len(wanted[0][1])
        if text(wanted) != text([found_result, self._met(ports[0], call)]):
            given = _given(recorded)
            compared.differ(
                name,
                f"schedule {self._seed}, call {number}: {name}\n"
                f"  given    {text(given)}\n"
                f"  recorded {text(wanted)}\n"
                f"  here     {text([found_result, ports[0]])}",
            )

    def _decoded(self, value: Any) -> Any:
        def made(value: Any) -> Any:
            thing = self._made[value["by"]]
            if thing is None:
                raise _MissingError
            return thing

        return decode(
            value, {"made": made, "port": lambda v: _Port(v["name"], self._ask)}
        )

    def _ask(self, port: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Answer a port's call as recorded."""
        said, asked = self._ports
        said.append(_asked(port, method, encode([args, kwargs], self._results)))
        if not asked:
            return None
        return self._decoded(self._renamed(asked.popleft()[3], Call(port, args, None)))

    def _result(self, thing: Any) -> Any:
        self._now = thing
        return {"": "made"}


def _as_it_is(value: Any, call: Call) -> Any:
    return value


class _MissingError(Exception):
    """An object that a call needs was not made here."""


class _Port:
    """A stand-in for a port that a replayed object calls."""

    def __init__(self, name: str, ask: Callable[..., Any]) -> None:
        self._name, self._ask = name, ask

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: self._ask(self._name, method, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(self._name, "", *args, **kwargs)


def _function(name: str, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return the function that does a recorded call by now, or None."""
    if name in REPLACED:
        return REPLACED[name]
    if name in FUNCTIONS:
        return found(FUNCTIONS[name])
    kind_name, _, method = name.partition(".")
    kind = found(CLASSES[kind_name].places)
    if method == "__init__":
        return kind
    member = getattr(kind, method, None)
    return member.fget if isinstance(member, property) else member


def _asked(port: str, method: str, arguments: Line) -> dict[str, Any]:
    """Return a call of a port as a value, which can be renamed."""
    return {"": f"ports.{port}.{method}", "arguments": arguments}


def _given(arguments: Line) -> Line:
    """Return the arguments without objects that other calls have made."""
    given = [*arguments[0], *arguments[1].values()]
    return [a for a in given if not (isinstance(a, dict) and a.get("") == "made")]
