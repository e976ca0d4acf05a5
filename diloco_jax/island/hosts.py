"""Keep the hosts of an island alike: host 0 decides, the others follow.

Decision n is what happens at the n-th boundary, on every host. Host 0 publishes it
LOOKAHEAD boundaries ahead, which is more than steps are dispatched ahead, so no host
waits for it. An adoption is decided only once every host has its part of the bytes:
host 0 sends orders to fetch as soon as it hears of a version, and the hosts answer.

Keys: `gives/HOST`, `begin`, `joined`, `told/HOST`; `decision/N`, `passed/N/HOST`;
`order/N`, `answer/N/HOST`; `leave`, `left`; `here/HOST`, where `joined.py` has them
meet, and `compiled/HOST`, `restored/HOST`, `ready/HOST`, where `host.py` does. Keys
under `folder/` belong to `checkpoints.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable

import msgspec

from diloco_jax.config.placement import Deadlines
from diloco_jax.island.mailbox import Arrival, Decisions, Mailbox, NetworkThreads
from diloco_jax.island.world import Hosts, HostsError
from diloco_jax.protocol.island.boundary import Ahead, Decision
from diloco_jax.protocol.island.conversation import Fetch, HostFetch, agreed
from diloco_jax.protocol.island.reporting import Introduction
from diloco_jax.protocol.messages import ResendRequest, Short, Version
from diloco_jax.wire.errors import ConnectionLost, Refused, VersionGone, WireError

logger = logging.getLogger(__name__)

BATCH = 32
"""Number of decisions after which a follower confirms them, so that their keys are
forgotten."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that host 0 knows and the others need before they build anything; in its
    place, or that of `JoinVersions`, they are told the island's `Ending`."""

    who: Introduction
    run_id: str
    lookahead: int
    """Boundaries between the publication of a decision and its time."""
    gives: bool
    """The island gives the run's first parameters."""
    versions: tuple[Version, ...]
    """Those that are published, as host 0 says hello."""
    workers: tuple[str, ...]
    """`Welcome.workers`."""


class JoinVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Host 0 has its part of every fragment, at these versions."""

    versions: tuple[Version, ...]


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Workers serve at other addresses from now on."""

    workers: tuple[str, ...]
    """`Welcome.workers`."""


Order = Fetch | ResendRequest | Moved
"""Bulk work for every host: its part of a version, or of a delta once more, and with
whom it is done."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order to fetch."""

    part: HostFetch
    traffic: dict[str, int]
    """What this host counted since it started."""
    short: tuple[Short, ...] = ()
    """Disk or memory, where its machine is short of it."""
    failed: tuple[str, ...] = ()
    """Donors that failed it."""


LOOK_S = 1.0
"""Seconds between two looks of host 0 whether another host is asked to end."""


class LeaveWatch(NetworkThreads):
    """Sees, on host 0, that another host is asked to end, as before a preemption: the
    island ends with it, wherever host 0 is."""

    def __init__(
        self, hosts: Hosts, mailbox: Mailbox, asked_to_end: Callable[[str], None]
    ) -> None:
        """asked_to_end: called with that host's reason."""
        super().__init__(mailbox, "watch of the other hosts", self._watch)
        self._hosts, self._asked_to_end = hosts, asked_to_end

    def _watch(self) -> None:
        with contextlib.suppress(HostsError):  # Whoever waits for that host says so.
            while not self._closing.wait(LOOK_S):
                if (reason := self._hosts.look("leave")) is not None:
                    self._asked_to_end(reason.decode())
                    return


class SharedDecisions:
    """Decide as host 0: a source's decision takes effect `lookahead` boundaries later,
    and is told to the others.

    Raises HostsError from `at` if another host is BATCH boundaries behind and does not
    come on within `patience_s`.
    """

    def __init__(
        self, source: Decisions, hosts: Hosts, lookahead: int, patience_s: float
    ) -> None:
        self._source, self._hosts, self._patience_s = source, hosts, patience_s
        self._ahead = Ahead(lookahead)
        self._numbers = itertools.count(lookahead)

    def at(self, step: int, *, stepping: bool) -> Decision:
        fresh, number = self._source.at(step, stepping=stepping), next(self._numbers)
        self._hosts.tell(f"decision/{number}", msgspec.msgpack.encode(fresh))
        if number % BATCH == 0:
            self._clean_up(number - 2 * BATCH, step)
        return self._ahead.next(fresh)

    def wait(self, timeout_s: float) -> None:
        """See mailbox.Decisions; does not wait while something is decided."""
        if not self._ahead.pending:
            self._source.wait(timeout_s)

    def _clean_up(self, start: int, step: int) -> None:
        """Forget a batch of decisions that all hosts have acted upon."""
        if start < 0:
            return
        for host in self._hosts.others:
            key = f"passed/{start + BATCH}/{host}"
            self._hosts.require(
                key,
                self._patience_s,
                f"host {host} is {BATCH} boundaries behind at step {step}, and did not "
                f"come on within {self._patience_s:g} s; all hosts of this island "
                f"start again together",
            )
            self._hosts.forget(key)
        for number in range(start, start + BATCH):
            self._hosts.forget(f"decision/{number}")


class FollowDecisions:
    """Wait, on another host, for the decision of host 0 for this boundary.

    Raises HostsError from `at` if that does not come within `patience_s`.
    """

    def __init__(
        self, hosts: Hosts, mailbox: Mailbox, lookahead: int, patience_s: float
    ) -> None:
        self._hosts, self._mailbox = hosts, mailbox
        self._lookahead, self._patience_s = lookahead, patience_s
        self._numbers = itertools.count()
        self._decode = msgspec.msgpack.Decoder(Decision).decode

    def at(self, step: int, *, stepping: bool) -> Decision:
        if (ending := self._mailbox.ending) is not None:
            raise HostsError(ending.text)
        number = next(self._numbers)
        if number < self._lookahead:
            return Decision()
        heard = self._hosts.require(
            f"decision/{number}",
            self._patience_s,
            f"host 0 said nothing for {self._patience_s:g} s at step {step}; all hosts "
            f"of this island start again together",
        )
        if number % BATCH == 0:
            self._hosts.tell(f"passed/{number}/{self._hosts.index}", b"")
        # Host 0 reports for all.
        self._mailbox.forget_records()
        return self._decode(heard)

    def wait(self, timeout_s: float) -> None:
        """Return at once: `at` waits for host 0."""


class Orders:
    """Host 0's end of the bulk work of its followers."""

    def __init__(self, hosts: Hosts, mailbox: Mailbox, patience_s: float) -> None:
        self._hosts, self._mailbox, self._patience_s = hosts, mailbox, patience_s
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._forgotten = 0

    def give(self, order: Order) -> int:
        """Give an order to all hosts; return its number."""
        with self._lock:
            number = next(self._numbers)
            self._hosts.tell(f"order/{number}", msgspec.msgpack.encode(order))
        return number

    def await_answers(self, number: int, arrival: Arrival | None) -> None:
        """Return when every host has done order `number`.

        arrival: of this host; None if it has failed to get its part, and says why.

        Raises VersionGone or ConnectionLost as the hosts' parts are `agreed`, and
        HostsError if a host does not answer in time.
        """
        parts = {}
        with self._lock:  # Orders are done in turn: those before it may take as long.
            patience_s = self._patience_s * (1 + max(0, number - self._forgotten))
        for host in self._hosts.others:
            key = f"answer/{number}/{host}"
            missing = f"host {host} did not fetch its part within {patience_s:g} s"
            heard = self._hosts.require(key, patience_s, missing)
            self._hosts.forget(key)
            answer = msgspec.msgpack.decode(heard, type=Answer)
            self._mailbox.count_of(host, answer.traffic, answer.short)
            self._mailbox.donors_failed(answer.failed)
            parts[host] = answer.part
        with self._lock:  # A host that answers one has read all before it.
            for read in range(self._forgotten, number + 1):
                self._hosts.forget(f"order/{read}")
            self._forgotten = max(self._forgotten, number + 1)
        if arrival is None:
            return
        parts[0] = HostFetch(outcome="done", chain=arrival.chain)
        outcome = agreed(list(parts.values()))
        if outcome == "gone":
            got = {host: part.chain for host, part in parts.items()}
            raise VersionGone(
                f"the coordinator dropped publishes while the hosts of this island "
                f"fetched them (publishes by host, None: not any more, {got})"
            )
        if outcome == "lost":
            raise ConnectionLost("a host of this island lost the coordinator")


class OrderThread(NetworkThreads):
    """A follower's end: do the orders one by one, on a thread of its own."""

    def __init__(
        self,
        hosts: Hosts,
        mailbox: Mailbox,
        fetch: Callable[[Fetch], Arrival],
        resend: Callable[[ResendRequest], None],
        moved: Callable[[tuple[str, ...]], None],
        deadlines: Deadlines,
    ) -> None:
        super().__init__(mailbox, f"following of host {hosts.index}", self._run)
        self._hosts, self._deadlines = hosts, deadlines
        self._fetch, self._resend, self._moved = fetch, resend, moved

    def _run(self) -> None:
        decode: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
        for number in itertools.count():
            heard = None
            while heard is None:
                if self._closing.is_set():
                    return
                heard = self._hosts.hear(f"order/{number}", self._deadlines.report_s)
            match decode(heard):
                case Fetch() as fetch:
                    part = self._fetched(fetch)
                    traffic, short = self._mailbox.counted()
                    failed = tuple(f.island for f in self._mailbox.failed_donors())
                    answer = Answer(
                        part=part, traffic=traffic, short=short, failed=failed
                    )
                    key = f"answer/{number}/{self._hosts.index}"
                    self._hosts.tell(key, msgspec.msgpack.encode(answer))
                case ResendRequest() as request:
                    self._resend(request)
                case Moved(workers=workers):
                    self._moved(workers)

    def _fetched(self, fetch: Fetch) -> HostFetch:
        """Fetch this host's part; return what became of it."""
        try:
            arrival = self._fetch(fetch)
        except VersionGone:
            return HostFetch(outcome="gone")
        except WireError as error:
            # Of a refusal host 0 hears, too, unless only this host has an old key.
            level = logging.WARNING if isinstance(error, Refused) else logging.DEBUG
            logger.log(level, "fragment %d not fetched: %s", fetch.fragment, error)
            return HostFetch(outcome="lost")
        self._mailbox.arrivals.drop_after(fetch.fragment, fetch.accepted)
        self._mailbox.arrivals.put(arrival)
        return HostFetch(outcome="done", chain=arrival.chain)
