"""The fetches of an island in virtual time, in the protocol's order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from diloco_jax.island.mailbox import Arrival, Arrivals
from diloco_jax.protocol.island.conversation import Conversation
from diloco_jax.protocol.island.fetching import Fetching
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.virtual.body import Body
from diloco_jax.simulation.virtual.connection import VirtualService
from diloco_jax.simulation.virtual.line import Line
from diloco_jax.simulation.virtual.merging import VirtualFetch


class VirtualFetches:
    """Fetches of one incarnation.

    came: called when something has arrived.
    """

    def __init__(
        self, conversation: Conversation, body: Body, came: Callable[[], None]
    ) -> None:
        self.arrivals = Arrivals()
        """Arrays that decisions name."""
        self._running = False
        """True once the join is over and published versions are fetched."""
        self._conversation, self._body, self._came = conversation, body, came
        self._source: tuple[VirtualService, Line] | None = None
        self._fetching: Fetching | None = None
        self._joined: dict[int, VirtualFetch] = {}
        self._waiting: Arrival | None = None
        """Version that was fetched and has no room so far."""

    @property
    def begun(self) -> bool:
        """True from the first welcome on."""
        return self._fetching is not None

    def begin(self, versions: tuple[Version, ...]) -> None:
        """Begin the join with these versions, or newer ones."""
        self._fetching = Fetching(versions)

    @property
    def joined(self) -> Mapping[int, VirtualFetch] | None:
        """The anchors of all fragments, in full; None until all have arrived."""
        fetching = self._fetching
        return self._joined if fetching is not None and fetching.joined else None

    def start(self) -> None:
        """Begin to fetch published versions: the join is over."""
        self._running, self._joined = True, {}
        self.fetch()

    def close(self) -> None:
        """End all fetches."""
        self._source = None

    def connect(self, service: VirtualService, line: Line) -> None:
        """Continue on another line; what was under way on the old line is lost."""
        self._source = service, line
        if self._fetching is not None:
            self._fetching.disconnected()

    def want(self, fragment: int, version: Version) -> None:
        """Note a published version; `fetch` begins to fetch it."""
        assert self._fetching is not None
        self._fetching.want(fragment, version)

    def fetch(self) -> None:
        """Begin the fetches that may be under way."""
        fetching = self._fetching
        if (
            fetching is None
            or not fetching.lags
            or self._source is None
            or self._waiting is not None
        ):
            return
        service, line = self._source
        if not (service.serves and line.open) or fetching.joined != self._running:
            return
        away = set[int]()
        while (fetch := fetching.next(away)) is not None:
            fetched = service.fetch(fetch.fragment, fetch.want, fetch.have)
            if fetched is None:
                fetching.failed(fetch.fragment)
                away.add(fetch.fragment)
                continue
            here = functools.partial(self._fetched, fetch.fragment, fetched)
            line.download(fetched.nbytes, here)

    def deliver(self) -> None:
        """Hand over the version that waits for room, and fetch what comes after it."""
        arrival = self._waiting
        if arrival is None:
            return
        fragment, chain = arrival.fragment, arrival.chain
        if self._conversation.has_room(fragment, chain):
            self._waiting = None
            self.arrivals.put(arrival)
            self._conversation.arrived(fragment, arrival.version, chain)
            self.fetch()

    def _fetched(self, fragment: int, fetched: VirtualFetch) -> None:
        if self._source is None:
            return
        assert self._fetching is not None
        self._fetching.got(fragment, fetched.version)
        if self._running:
            self._waiting = self._body.arrival(fragment, fetched)
            self.deliver()
        else:
            self._joined[fragment] = fetched
            self.fetch()
        self._came()
