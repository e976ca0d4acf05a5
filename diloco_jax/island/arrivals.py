"""Published fragments that have arrived, until a decision has them adopted."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from diloco_jax.protocol.values import Version


class NotHereError(Exception):
    """A decision adopts a version that this host does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A newer version of a fragment, on the device and ready to be adopted.

    Either `anchor` is A_v in full, or `publishes` lead to it from the version before:
    encoded, oldest first. Both are by piece, in the plan's order, as they have landed
    on this host (`device/spread.py`).
    """

    fragment: int
    version: Version
    anchor: tuple[Any, ...] | None = None
    publishes: tuple[tuple[Any, ...], ...] = ()

    @property
    def chain(self) -> int | None:
        """Publishes in this arrival; None if it is an anchor in full."""
        return None if self.anchor is not None else len(self.publishes)

    def followed_by(self, later: Arrival) -> Arrival:
        """Return both arrivals as one."""
        if later.anchor is not None:
            return later
        return dataclasses.replace(
            self, version=later.version, publishes=(*self.publishes, *later.publishes)
        )


class Arrivals:
    """Arrivals of one host, by fragment and version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Arrival]] = {}

    def put(self, arrival: Arrival) -> None:
        """Keep an arrival; versions of a fragment come in order."""
        with self._lock:
            self._waiting.setdefault(arrival.fragment, []).append(arrival)

    def drop_after(self, fragment: int, accepted: Version | None) -> None:
        """Drop the arrivals after that version: another host failed to get its part."""
        with self._lock:
            self._waiting[fragment] = [
                arrival
                for arrival in self._waiting.get(fragment, ())
                if accepted is not None and arrival.version <= accepted
            ]

    def pick(self, fragment: int, version: Version) -> Arrival:
        """Return all arrivals that lead to `version`, as one; raises NotHereError."""
        with self._lock:
            waiting = self._waiting.get(fragment, [])
            due = [a for a in waiting if a.version <= version]
            self._waiting[fragment] = waiting[len(due) :]
        if not due or due[-1].version != version:
            raise NotHereError(
                f"fragment {fragment} is to be adopted at version {tuple(version)}, "
                f"this host has {[tuple(a.version) for a in due]}"
            )
        arrival = due[0]
        for later in due[1:]:
            arrival = arrival.followed_by(later)
        return arrival
