"""The conversation with the coordinator, between train loop and network threads.

One lock, held for moments; nothing in here touches the network or a device. The loop
never waits in `decide` or `post`. Only `wait` waits, and the live loop does not call it
while it trains. The protocol says what messages mean (`protocol/island/`). Published
fragments wait here too, as `Arrivals`, until a decision has them adopted.

The loop asks a source of decisions (`Decisions`): on host 0 the mailbox decides. The
other hosts follow host 0 (`hosts.py`), and the runtime tests have a fixed script
(tests/runtime/scripted.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from diloco_jax.errors import EXIT_FAILED
from diloco_jax.protocol.island.boundary import Decision, Ending, RefusedTake
from diloco_jax.protocol.island.conversation import Conversation
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import (
    DonorFailed,
    EndReason,
    FromCoordinator,
    Record,
    Short,
    Version,
)

logger = logging.getLogger(__name__)


COUNTED = (
    *("bytes_up", "bytes_down", "bytes_join"),
    *("microseconds_up", "transfers_failed"),
)
"""Measures of an island's traffic, which every host of it counts."""


class Mailbox:
    """Link one train loop and its network threads. All methods are thread-safe.

    awaits_last: as for `Conversation`.
    """

    def __init__(self, *, awaits_last: bool = False) -> None:
        self.arrivals = Arrivals()
        """Arrays that decisions name."""
        self.errands: Mapping[type, Callable[[Any], None]] = {}
        """Called with each type of errand; empty until a join, which fetches
        everything, has begun."""
        self._changed = threading.Condition(threading.RLock())
        self._conversation = Conversation(awaits_last=awaits_last)
        self._traffic = {0: dict.fromkeys(COUNTED, 0)}
        """What each host of the island has counted; 0: this one."""
        self._trial: dict[str, float] = {}
        """See `Measures.trial`."""
        self._short: dict[int, tuple[Short, ...]] = {}
        """Disk or memory, where the machine of a host is short of it."""
        self._left = dict.fromkeys(("programs_left", "fragments_left"), 0)
        """What is left of this host's start."""

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Conversation]:
        with self._changed:
            yield self._conversation
            self._changed.notify_all()

    # ---- the loop's side --------------------------------------------------------

    def decide(self) -> Decision:
        """Return the decision for the next boundary. Does not wait."""
        with self._changing() as conversation:
            return conversation.decide()

    def post(self, status: Status, records: tuple[Record, ...] = ()) -> None:
        """Post where the loop is, together with what happened up to there."""
        with self._changing() as conversation:
            conversation.post(status, records)

    def wait(self, timeout_s: float) -> None:
        """Return when something came in after the last `decide`, or at the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._conversation.has_news, timeout_s)

    def leave(self) -> None:
        """Announce that the island is about to leave: no more steps, takes are
        answered."""
        with self._changing() as conversation:
            conversation.leave()

    def wait_to_leave(self, timeout_s: float) -> bool:
        """Wait until the coordinator lets the island leave, or the island ends; return
        False after `timeout_s`.
        """
        with self._changed:
            conversation = self._conversation
            return self._changed.wait_for(
                lambda: conversation.may_leave or conversation.ending is not None,
                timeout_s,
            )

    def give_up(self) -> None:
        """Stop waiting for publishes from before the run's end; the run is over without
        them.
        """
        with self._changing() as conversation:
            conversation.give_up()

    @property
    def finished(self) -> bool:
        """True once the coordinator has said that the run is over."""
        with self._changed:
            return self._conversation.finished

    @property
    def ending(self) -> Ending | None:
        """Reason for the loop to end at the next boundary; the first one stands."""
        with self._changed:
            return self._conversation.ending

    # ---- the network's side -----------------------------------------------------

    def receive(self, message: FromCoordinator) -> None:
        """Note a message of the coordinator; have the bulk work that it asks for done,
        as `errands` says.

        Raises ValueError if a grant before this one is missing.
        """
        with self._changing() as conversation:
            errands = conversation.receive(message)
        for errand in errands:
            if self.errands:
                self.errands[type(errand)](errand)

    def deliver(self, arrival: Arrival, timeout_s: float) -> bool:
        """Hand over an arrival; False if the loop did not make room in time."""
        fragment, chain = arrival.fragment, arrival.chain
        with self._changing() as conversation:
            if not self._changed.wait_for(
                lambda: conversation.has_room(fragment, chain), timeout_s
            ):
                return False
            self.arrivals.put(arrival)
            conversation.arrived(fragment, arrival.version, chain)
            return True

    def forget_records(self) -> None:
        """Drop the records: another host of the island reports them."""
        with self._changed:
            self._conversation.forget_records()

    def donors_failed(self, names: Iterable[str]) -> None:
        """Note islands of the region that failed this one: the coordinator is to hear
        of it, and they are asked no more for a while, where this host decides."""
        names = tuple(names)
        self.tell_failed(names)
        if (rest := self.errands.get(DonorFailed)) is not None:
            for name in names:
                rest(name)

    def tell_failed(self, names: Iterable[str]) -> None:
        """Have the coordinator hear that these islands failed this one."""
        with self._changed:
            for name in names:
                self._conversation.donor_failed(name)

    def failed_donors(self) -> tuple[DonorFailed, ...]:
        """Return what is to be said of them, once."""
        with self._changed:
            return self._conversation.failed_donors()

    def end(self, exit_code: int, text: str, reason: EndReason = "failed") -> None:
        """End the loop at its next boundary."""
        with self._changing() as conversation:
            conversation.end(Ending(exit_code, text, reason))

    def count(self, **found: int) -> None:
        """Add to measures named in `COUNTED`."""
        with self._changed:
            for name, value in found.items():
                self._traffic[0][name] += value

    def tell_trial(self, **found: float) -> None:
        """Note what this island tried before its first step."""
        with self._changed:
            self._trial |= {k: v for k, v in found.items() if math.isfinite(v)}

    def counted(self) -> tuple[dict[str, int], tuple[Short, ...]]:
        """Return what this host counted so far, and what its machine is short of."""
        with self._changed:
            return dict(self._traffic[0]), self._short.get(0, ())

    def count_of(
        self, host: int, traffic: dict[str, int], short: tuple[Short, ...]
    ) -> None:
        """Note what another host of the island has `counted`. Its reports may come out
        of order, so a lower count is ignored.
        """
        with self._changed:
            before, self._short[host] = self._traffic.get(host, {}), short
            self._traffic[host] = {
                name: max(value, before.get(name, 0)) for name, value in traffic.items()
            }

    def tell_short(self, short: tuple[Short, ...]) -> None:
        """Note what little is left of on this machine."""
        with self._changed:
            self._short[0] = short

    def tell_left(self, **left: int) -> dict[str, int]:
        """Note programs_left or fragments_left of the start; return both."""
        with self._changed:
            self._left |= left
            return self._left

    def status(self) -> Status:
        """Return the last posted status, with the traffic of all hosts so far, and with
        versions that wait for the next boundary."""
        with self._changed:
            return self._of_all_hosts(self._conversation.status())

    def report(self, sent_through: int) -> tuple[Status, tuple[Record, ...]]:
        """Return the status, and the records after number `sent_through`."""
        with self._changed:
            status = self._of_all_hosts(self._conversation.current())
            return status, self._conversation.unsent(sent_through)

    def wait_for_post(
        self, has_news: Callable[[Status, int], bool], timeout_s: float
    ) -> None:
        """Return once there is something to report, or at the timeout. has_news: called
        with the status and the number of the newest record; see `Reporting`."""

        def posted() -> bool:
            conversation = self._conversation
            return has_news(conversation.posted, conversation.newest_record)

        with self._changed:
            self._changed.wait_for(posted, timeout_s)

    def _of_all_hosts(self, status: Status) -> Status:
        hosts = self._traffic.values()
        traffic = {name: sum(host[name] for host in hosts) for name in self._traffic[0]}
        short = tuple(sorted(set().union(*self._short.values())))
        found = {**traffic, **self._left, "trial": dict(self._trial)}
        measures = replace(status.measures, **found, short=short)
        return replace(status, measures=measures)


class NetworkThreads:
    """Threads of an island's network, which end with it: an error in one ends the
    island. Subclasses that wait on `_changed` look at `_closing` then."""

    def __init__(self, mailbox: Mailbox, name: str, *runs: Callable[[], None]) -> None:
        """runs: what each thread does until `_closing`."""
        self._mailbox, self._name = mailbox, name
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            for run in runs
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self, timeout_s: float) -> None:
        """End the threads; a transfer may go on until the process ends."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            if self._closing.is_set():
                return
            logger.exception("the %s failed", self._name)
            self._mailbox.end(EXIT_FAILED, f"the {self._name} failed: {error!r}")


class Decisions(Protocol):
    """A source of decisions."""

    def at(self, step: int, *, stepping: bool) -> Decision:
        """Return the decision for the boundary before `step`; stepping: steps will
        follow."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when something may have come in since `at`, or at the timeout."""
        ...


class LiveDecisions:
    """Decide upon the messages that have arrived by now; `at` never waits.

    Args:
      save_due: asked whether it is time for a checkpoint.
      last_s: seconds after the end of the run within which its last publishes may
        still come; a coordinator that is done waits for its islands meanwhile.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        save_due: Callable[[], bool],
        last_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mailbox, self._save_due = mailbox, save_due
        self._last_s, self._clock = last_s, clock
        self._over_at: float | None = None

    def at(self, step: int, *, stepping: bool) -> Decision:
        decision = self._mailbox.decide()
        if self._mailbox.finished and not decision.finished:
            now = self._clock()
            self._over_at = now if self._over_at is None else self._over_at
            if now - self._over_at >= self._last_s:
                self._mailbox.give_up()
        if stepping and self._save_due():
            decision = replace(decision, save=True)
        return decision

    def wait(self, timeout_s: float) -> None:
        self._mailbox.wait(timeout_s)


class NotHereError(Exception):
    """A decision adopts a version that this host does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A newer version of a fragment, on the device and ready to be adopted.

    Either `anchor` is A_v in full, or `publishes` lead to it from the version before:
    encoded, oldest first. Both are by piece, in the plan's order, as they have landed
    on this host (`device/mesh.py`). While the host compiles it has the bytes of an
    anchor in `octets`, for `put_anchor`: its devices try out programs meanwhile.
    """

    fragment: int
    version: Version
    anchor: tuple[Any, ...] | None = None
    publishes: tuple[tuple[Any, ...], ...] = ()
    octets: memoryview | None = None

    @property
    def chain(self) -> int | None:
        """Publishes in this arrival; None if it is an anchor in full."""
        whole = self.anchor is not None or self.octets is not None
        return None if whole else len(self.publishes)

    def followed_by(self, later: Arrival) -> Arrival:
        """Return both arrivals as one."""
        if later.chain is None:
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
        return functools.reduce(Arrival.followed_by, due)


def log_refused(takes: Iterable[RefusedTake]) -> None:
    """Log each refused take, with the reason and the outcome for its steps."""
    for take in takes:
        # A take without steps is no news: the island was asked twice within a step.
        logger.log(
            logging.DEBUG if take.reason == "empty" else logging.WARNING,
            "take of fragment %d at tick %d was refused (%s): its steps are %s",
            take.fragment,
            take.tick,
            take.reason,
            "open again" if take.outcome == "reopened" else "lost",
        )
