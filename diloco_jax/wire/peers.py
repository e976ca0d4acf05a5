"""Peers: who they are, and what a server lets them take.

A principal is the owner of a certificate, by its role, and by its name if there are
several. A certificate carries it as a URI, `diloco:island:v6e`, and its files are named
after it, `island.v6e.pem`. The name that an island claims is compared with the
certificate of its connection at every hello, upload and fetch. Reports belong to the
stream of a hello.

A control message may cost lines on the tape and the log, and time of the one thread
that decides, so a peer that is too fast waits. A transfer or call holds a thread: those
that find no slot wait for a while, and are then told Busy. A refused call costs its
peer nothing and may come a thousand times a second, so each peer has a few lines of the
log.

Queues are bounded, waits end, and threads hold up no process. gRPC's synchronous
interface has no deadline on one message of a stream; `IdleWatch` adds it. Its threads,
and those of the standard library's pools, outlive their owner. The threads of
`DaemonPool` do not keep a process from ending.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent import futures
from typing import Any

import msgspec

from diloco_jax.protocol.messages import ISLAND_NAME
from diloco_jax.wire.errors import Busy, Refused, WireError

logger = logging.getLogger(__name__)

# ---- who they are ---------------------------------------------------------------

NO_NAME = r"\A\Z"
NAMES = {
    "coordinator": NO_NAME,
    "worker": r"\A[0-9]{1,64}\Z",
    "island": ISLAND_NAME,
    "reader": NO_NAME,
    "operator": NO_NAME,
}
"""Patterns of the names of principals by role."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a key of its own."""

    role: str
    """One of `NAMES`."""
    name: str = ""
    """Name of an island, or number of a worker; empty for other roles."""

    @property
    def uri(self) -> str:
        """The principal's name in its certificate."""
        return ":".join(filter(None, ("diloco", self.role, self.name)))

    @property
    def stem(self) -> str:
        """The name of the principal's files, without .pem and .key."""
        return ".".join(filter(None, (self.role, self.name)))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.role, self.name)))


COORDINATOR = Principal(role="coordinator")
READER = Principal(role="reader")
"""Looks on: `diloco status`."""
OPERATOR = Principal(role="operator")
"""Steers a run from outside."""


def island(name: str) -> Principal:
    """Return the principal of an island."""
    return Principal(role="island", name=name)


def worker(number: int) -> Principal:
    """Return the principal of a worker of the coordinator."""
    return Principal(role="worker", name=str(number))


def of_uri(uri: str) -> Principal | None:
    """Return the principal that a URI names; None if it names none."""
    found = _of(*uri.removeprefix("diloco:").partition(":")[::2])
    return found if found is not None and found.uri == uri else None


def of_stem(stem: str) -> Principal | None:
    """Return the principal whose files have this name; None if there is none."""
    found = _of(*stem.partition(".")[::2])
    return found if found is not None and found.stem == stem else None


def _of(role: str, name: str) -> Principal | None:
    known = role in NAMES and re.search(NAMES[role], name)
    return Principal(role=role, name=name) if known else None


def require(caller: Principal | None, wanted: Principal) -> None:
    """Raise Refused unless the caller is the principal whom a call is for.

    caller: None if the address is served without TLS; then every caller is accepted.
    """
    if caller is None or caller == wanted:
        return
    how = f"--add --islands {wanted.name}" if wanted.role == "island" else "--add"
    raise Refused(
        "identity",
        f"this is for the {wanted}, and the caller's certificate is that of {caller}; "
        f"start it with the {wanted.stem}.pem and .key of the {wanted} (`diloco certs "
        f"DIR {how}` makes them)",
    )


def require_run(call: Any, run_id: str) -> None:
    """Raise Refused unless a call is of the run that this process serves."""
    if call.run_id != run_id:
        raise Refused(
            "run_id",
            f"this process serves run {run_id}, the call is of run {call.run_id}; "
            f"check the coordinator's address",
        )


def mismatch(found: Principal | None, field: str, *wanted: Principal) -> str:
    """Explain why a server is none of the principals that may answer; empty if it is
    one. field: the config's, with the address that was dialled."""
    if found in wanted:
        return ""
    return (
        f"that is the certificate of {found or 'nobody'}, and has to be that of "
        f"{' or of the '.join(map(str, wanted))}; check {field}, and what listens there"
    )


# ---- what they may take ---------------------------------------------------------

KEPT_IDLE = 8
"""Threads of a pool that wait for tasks; one that is done when there are as many ends.
A thread that is started again costs far less than a transfer."""
_ITEM_OVERHEAD_BYTES = 64
_POLL_S = 60.0


class QueueClosed(Exception):  # noqa: N818
    """The queue is closed and, for its reader, empty. `error` says why, if anything."""

    def __init__(self, error: WireError | None) -> None:
        super().__init__(error)
        self.error = error


class ByteQueue:
    """First-in-first-out queue, bounded by the bytes it holds; it ends when closed."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        """Bytes that the items take, with a little extra for each."""
        self._items: collections.deque[bytes] = collections.deque()
        self._condition = threading.Condition()
        self._closed = False
        self._error: WireError | None = None

    def put(self, item: bytes, *, wait: bool = False) -> bool:
        """Add an item; return False if there is no room, or wait for room with `wait`.

        Raises QueueClosed if the queue is closed.
        """
        size = len(item) + _ITEM_OVERHEAD_BYTES
        with self._condition:
            while True:
                if self._closed:
                    raise QueueClosed(self._error)
                if not self._items or self.held_bytes + size <= self._limit_bytes:
                    break
                if not wait:
                    return False
                self._condition.wait(_POLL_S)
            self._items.append(item)
            self.held_bytes += size
            self._condition.notify_all()
            return True

    def get(self, timeout_s: float = _POLL_S) -> bytes | None:
        """Return the next item; None after `timeout_s` without one; QueueClosed after
        the last."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not self._items:
                if self._closed:
                    raise QueueClosed(self._error)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._condition.wait(left_s)
            item = self._items.popleft()
            self.held_bytes -= len(item) + _ITEM_OVERHEAD_BYTES
            self._condition.notify_all()
            return item

    def items(self) -> Iterator[bytes]:
        """Yield what is put, until the queue is closed."""
        with contextlib.suppress(QueueClosed):
            while True:
                if (item := self.get()) is not None:
                    yield item

    def close(self, error: WireError | None = None, *, discard: bool = False) -> None:
        """Accept no more items; what is held is still read unless `discard`. The first
        call's error stays."""
        with self._condition:
            if not self._closed:
                self._closed, self._error = True, error
            if discard:
                self._items.clear()
                self.held_bytes = 0
            self._condition.notify_all()


class Guard:
    """One wait or transfer under an `IdleWatch`."""

    def __init__(self, limit_s: float, on_expiry: Callable[[], Any]) -> None:
        self.limit_s = limit_s
        self.expired = False
        self.on_expiry = on_expiry
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Note progress: the limit starts anew."""
        self._touched = time.monotonic()

    @property
    def expires(self) -> float:
        """Time on the monotonic clock at which the guard expires unless touched."""
        return self._touched + self.limit_s


class IdleWatch:
    """End what makes no progress: one daemon thread for any number of guards."""

    def __init__(self, name: str) -> None:
        self._guards: set[Guard] = set()
        self._condition = threading.Condition()
        self._closed, self._until = False, math.inf
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def guard(self, limit_s: float, on_expiry: Callable[[], Any]) -> Iterator[Guard]:
        """Call `on_expiry`, which must not block, if nothing touches the guard for
        `limit_s` inside the block. It is never called, or at work, after the block."""
        guard = Guard(limit_s, on_expiry)
        with self._condition:
            self._guards.add(guard)
            if guard.expires < self._until:
                self._condition.notify()
        try:
            yield guard
        finally:
            with self._condition:
                self._guards.discard(guard)

    def close(self, timeout_s: float) -> None:
        """End the thread; guards expire no more."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._closed:
                    return
                now = time.monotonic()
                expired = [guard for guard in self._guards if guard.expires <= now]
                self._guards.difference_update(expired)
                # With the lock, so that no guard is over meanwhile: what it guarded
                # may serve another.
                for guard in expired:
                    guard.expired = True
                    guard.on_expiry()
                if not expired:
                    first = min((g.expires for g in self._guards), default=math.inf)
                    self._until = min(first, now + _POLL_S)
                    self._condition.wait(self._until - now)


class DaemonPool(futures.Executor):
    """At most `limit` daemon threads, started when needed, and ended when idle.

    If the system has no more threads, tasks wait for those that there are.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._condition = threading.Condition()
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()
        self._idle = 0
        self._closed = False

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Submit a task like `concurrent.futures.Executor.submit`; RuntimeError after
        `close`, or if the system refuses the first thread."""
        future: futures.Future[Any] = futures.Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        with self._condition:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle <= len(self._tasks) and len(self._threads) < self._limit:
                name = f"{self._name}-{next(self._numbers)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError:  # "can't start new thread"
                    if not self._threads:
                        raise
            self._tasks.append(task)
            self._condition.notify()
        return future

    def close(self, timeout_s: float) -> None:
        """Take no more tasks and wait for those under way, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._condition:
                if self._idle >= KEPT_IDLE and not self._tasks:
                    self._threads.discard(threading.current_thread())
                    return
                self._idle += 1
                while not self._tasks and not self._closed:
                    self._condition.wait(_POLL_S)
                self._idle -= 1
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            del task  # an idle thread would hold its arguments, a whole payload


AT_ONCE = 20
"""Lines about one peer in a row."""
EVERY_S = 60.0
"""Seconds in which a peer earns another one."""
MOST_KNOWN = 1000
"""Peers whose lines are counted; beyond these, the one longest without a line is
forgotten."""
MOST_CHARS = 1000
"""Characters of one line."""


class RateLimitedLog:
    """The lines of one server, by peer. Any thread may call it."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._known: dict[Hashable, tuple[float, float, int]] = {}
        """Lines left, when, and how many were left out since the last one. Peers
        without a certificate share theirs."""

    def log(
        self,
        logger: logging.Logger,
        level: int,
        who: Hashable,
        text: str,
        *,
        trace: bool = False,
    ) -> None:
        """Log a line about `who`, a peer or in words several, or count it. The next
        line says how many were left out. trace: with the error at hand."""
        if not logger.isEnabledFor(level):
            return
        now = time.monotonic()
        with self._lock:
            left, at, out = self._known.pop(who, (float(self._at_once), now, 0))
            left = min(left + (now - at) / EVERY_S, self._at_once)
            written = left >= 1
            # The newest one stands last.
            self._known[who] = (left - 1, now, 0) if written else (left, now, out + 1)
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        if written:
            name = "peers without a certificate" if who is None else who
            more = f"; {out} more lines about {name} were left out" if out else ""
            logger.log(level, "%s%s", text[:MOST_CHARS], more, exc_info=trace)


BYTES_PER_SECOND = 64 << 10
"""Rate of one island in the long run: hundreds of records, or one hello, a second."""
BURST_BYTES = 4 << 20
HELLO_BYTES = 64 << 10
"""Bytes that a hello counts for: it may end one incarnation and begin another, and each
is made durable."""
REQUESTS_PER_SECOND = 16
"""Rate of requests for bulk, for each slot of the peer: stripes have 1 MiB or more
unless the payload is smaller, so it holds up no link."""
LEAST_REQUESTS = 64
BURST_S = 8
"""Seconds of requests at that rate which may come at once, as in a join."""


class Quota:
    """The quota of one peer, over all of its streams or connections. Any thread may
    call it."""

    def __init__(
        self,
        who: str,
        rate: float = BYTES_PER_SECOND,
        burst: float = BURST_BYTES,
        what: str = "bytes of control messages",
    ) -> None:
        """rate, burst: of `what`, a second and at once."""
        self._who, self._rate, self._burst, self._what = who, rate, burst, what
        self._lock, self._log = threading.Lock(), RateLimitedLog(at_once=1)
        self._left, self._at = float(burst), time.monotonic()

    def wait_s(self, amount: int) -> float:
        """Count so much; return the seconds to wait before it is handled."""
        with self._lock:
            now = time.monotonic()
            earned = (now - self._at) * self._rate
            self._left = min(self._left + earned, self._burst) - amount
            self._at = now
            if self._left >= 0:
                return 0.0
            wait_s = -self._left / self._rate
        self._log.log(
            logger,
            logging.WARNING,
            self._who,
            f"{self._who} sends more than {self._rate:.0f} {self._what} a second; "
            f"what it sends waits",
        )
        return wait_s


def requests_quota(who: object, slots: int) -> Quota:
    """Return the quota of a peer's requests for bulk; slots: its transfers at once."""
    rate = max(REQUESTS_PER_SECOND * slots, LEAST_REQUESTS)
    return Quota(str(who), rate, BURST_S * rate, "requests for bulk")


MOST_SLOTS = 4096
"""Transfers at once. With waiting ones and sessions of 64 islands, their threads are
fewer than the 4,915 that a service of Linux may have (systemd's TasksMax)."""
MOST_WAITING = 256
"""Transfers that wait for a slot. Those beyond are told Busy at once."""


class TransferSlots:
    """The slots of one server, for transfers in both directions or for calls: what
    users are told of as places."""

    def __init__(
        self,
        wanted: int,
        wait_s: float,
        each: float = math.inf,
        what: str = "transfers",
    ) -> None:
        """wanted: transfers that all peers may begin together. wait_s: longest wait for
        a slot. each: most transfers of one known peer. what: them, in words."""
        self.count = min(wanted, MOST_SLOTS)
        self.threads = self.count + MOST_WAITING
        """Threads that hold or await a slot."""
        self._wait_s, self._each, self._what = wait_s, each, what
        self._free = threading.Semaphore(self.count)
        self._waiting = threading.Semaphore(MOST_WAITING)
        self._own: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, who: Hashable = None) -> Iterator[None]:
        """Hold a slot for the length of the block.

        Raises Busy if no slot becomes free in time, or if the peer `who` has its share
        already. who: None = the peer is not known, and has no share of its own.
        """
        with self._lock:
            if who is not None and self._own[who] >= self._each:
                raise Busy(
                    f"{who} has {self._own[who]} {self._what} under way, the limit is "
                    f"{self._each} each"
                )
            self._own[who] += 1
        try:
            if not self._free.acquire(blocking=False):
                self._wait()
            try:
                yield
            finally:
                self._free.release()
        finally:
            with self._lock:
                self._own[who] -= 1
                if not self._own[who]:
                    del self._own[who]

    def _wait(self) -> None:
        if not self._waiting.acquire(blocking=False):
            raise Busy(
                f"all {self.count} places for {self._what} are taken, and "
                f"{MOST_WAITING} {self._what} wait for one"
            )
        try:
            if not self._free.acquire(timeout=self._wait_s):
                raise Busy(
                    f"all {self.count} places for {self._what} were taken for "
                    f"{self._wait_s:g} s"
                )
        finally:
            self._waiting.release()


OTHER_FILES = 512
"""Files that the process opens besides its connections."""


def allow_connections(connections: int) -> int:
    """Raise this process's limit on open files as far as `connections` need it. Warn if
    the system's limit is lower. Return how many of them leave room for other files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        logger.warning(
            "islands may open %d connections, and this process may open %d files: "
            "the oldest idle ones make room for those beyond; raise the limit "
            "(ulimit -Hn, LimitNOFILE=), or lower placement.bulk_channels",
            connections,
            limit,
        )
    return min(connections, max(limit - OTHER_FILES, limit // 2))


class Backoff:
    """Pauses between attempts: first the shortest, then doubled each time up to the
    longest."""

    def __init__(self, shortest_s: float, longest_s: float, failures: int = 0) -> None:
        """As in `Deadlines.retries_s`. failures: attempts that failed before these."""
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._pause_s = shortest_s
        for _ in range(failures):
            self.next_s()

    def next_s(self) -> float:
        """Return the seconds until the next attempt."""
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin again with the shortest pause, since an attempt got through."""
        self._pause_s = self._shortest_s
