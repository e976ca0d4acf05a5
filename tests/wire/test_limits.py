"""Limits of a server: places for transfers, rates, lines of the log, open files; queues
that are bounded, waits that end, threads that hold up nobody."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from wire_support import (
    WAIT_S,
    Clock,
    deadlines,
    fetch_request,
    hello,
    random_bytes,
    report,
    until,
    upload_start,
)

from diloco_jax.protocol.messages import Steer, Version
from diloco_jax.wire import peers, server, session
from diloco_jax.wire.errors import Busy, Refused, VersionGone
from diloco_jax.wire.peers import (
    AT_ONCE,
    EVERY_S,
    MOST_CHARS,
    MOST_KNOWN,
    ByteQueue,
    DaemonPool,
    IdleWatch,
    QueueClosed,
    RateLimitedLog,
    TransferSlots,
    island,
)

MIB = 1 << 20
ONE_ATTEMPT = deadlines(retry_min_s=3 * WAIT_S)

logger = logging.getLogger("diloco_jax.wire.test")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    return clock


def test_transfers_beyond_the_places_wait_then_are_busy_and_status_gets_through(
    serve, connect, handlers, monkeypatch
):
    many, _ = serve(max_islands=1, max_hosts=16, bulk_channels=2)
    assert many._bulk._slots.count == 64, "each channel of a host, either way"
    server, address = serve(max_islands=1, max_hosts=1, bulk_channels=1)
    monkeypatch.setattr(server._bulk._slots, "_wait_s", 0.2)
    entered, leave = threading.Semaphore(0), threading.Event()
    original = handlers.upload_end

    def upload_end(start, place):
        entered.release()
        leave.wait(WAIT_S)
        return original(start, place)

    monkeypatch.setattr(handlers, "upload_end", upload_end)
    client = connect(address, bulk_channels=2)
    with ThreadPoolExecutor(1) as pool:
        payload = bytes(2 * MIB)
        sent = pool.submit(client.transfers.upload, upload_start(2 * MIB), payload)
        for _ in range(2):
            assert entered.acquire(timeout=WAIT_S)
        refused = r"fragment 3 given up at byte 0, .*all 2 places .* taken for 0\.2 s"
        with pytest.raises(Busy, match=refused):
            connect(address, deadlines=ONE_ATTEMPT).transfers.upload(
                upload_start(10), bytes(10)
            )
        assert client.status(WAIT_S)["islands"]
        leave.set()
        assert sent.result(WAIT_S) > len(payload)


def test_places_are_bounded_whatever_the_hosts_and_so_are_those_who_wait(monkeypatch):
    """Who waits gets the first place that is free."""
    monkeypatch.setattr(peers, "MOST_SLOTS", 3)
    monkeypatch.setattr(peers, "MOST_WAITING", 2)
    few = TransferSlots(2 * 4 * 64 * 64, WAIT_S)
    assert (few.count, few.threads) == (3, 5)
    holding, leave = threading.Semaphore(0), threading.Event()

    def transfer():
        with few.taken():
            holding.release()
            leave.wait(WAIT_S)

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(transfer) for _ in range(5)]
        for _ in range(3):
            assert holding.acquire(timeout=WAIT_S)
        until(lambda: not few._waiting._value)
        refused = r"all 3 places .* and 2 transfers wait"
        with pytest.raises(Busy, match=refused), few.taken():
            pytest.fail("there is no place")
        leave.set()
        for one in running:
            one.result(WAIT_S)
    assert (few._free._value, few._waiting._value) == (3, 2)


def test_one_peer_cannot_take_all_places():
    few = TransferSlots(4, 0.0, each=2)
    with few.taken("b"), few.taken("a"), few.taken("a"):
        refused = "a has 2 transfers under way, the limit is 2"
        with pytest.raises(Busy, match=refused), few.taken("a"):
            pass
        with few.taken("b"):
            pass
    with few.taken("a"), few.taken("a"):
        assert set(few._own) == {"a"}, "who has none is forgotten"
    with few.taken(), few.taken(), few.taken(), few.taken():
        pass


def test_a_stripe_that_finds_the_peer_busy_comes_again_alone(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    original, begun = handlers.upload_begin, []

    def upload_begin(start):
        begun.append(start.offset)
        if start.offset == 2 * MIB and begun.count(start.offset) < 3:
            raise Busy("the merge buffer is full")
        return original(start)

    monkeypatch.setattr(handlers, "upload_begin", upload_begin)
    payload = random_bytes(4 * MIB)
    client = connect(address, deadlines=deadlines(retry_min_s=0.1))
    client.transfers.upload(upload_start(4 * MIB), payload)
    assert handlers.stored == payload
    assert sorted(begun) == [0, MIB, *[2 * MIB] * 3, 3 * MIB]


@pytest.mark.parametrize(
    ("hard", "expected", "told", "fit"),
    [
        (100_000, 20_512, False, 20_000),
        (5000, 5000, True, 5000 - peers.OTHER_FILES),
        (600, 600, True, 300),
    ],
)
def test_the_limit_on_open_files_follows_the_connections(
    monkeypatch, caplog, hard, expected, told, fit
):
    """Those that fit leave room for other files."""
    seen = [(512, hard)]
    monkeypatch.setattr(peers.resource, "getrlimit", lambda _: seen[-1])
    monkeypatch.setattr(peers.resource, "setrlimit", lambda _, new: seen.append(new))
    assert peers.allow_connections(20_000) == fit
    assert seen[-1] == (expected, hard)
    assert ("20000 connections" in caplog.text) == told
    peers.allow_connections(0)
    assert len(seen) == 2, "it is never lowered"


# ---- rates ---------------------------------------------------------------------------


def test_a_peer_may_send_a_burst_then_waits(clock, caplog):
    paced = peers.Quota("island a")
    half = peers.BURST_BYTES // 2
    assert [paced.wait_s(half), paced.wait_s(half)] == [0.0, 0.0]
    waits = [paced.wait_s(peers.BYTES_PER_SECOND) for _ in range(3)]
    assert waits == pytest.approx([1.0, 2.0, 3.0])
    (told,) = caplog.messages
    assert "island a sends more than 65536 bytes of control messages a second" in told
    clock.now += 3.0
    assert paced.wait_s(0) == 0.0
    clock.now += 1e6
    assert paced.wait_s(peers.BURST_BYTES) == 0.0
    assert paced.wait_s(peers.BYTES_PER_SECOND) == pytest.approx(1.0), "no more saved"


def test_a_session_reads_no_faster(serve, connect, handlers, monkeypatch):
    waited = []
    # None is earned meanwhile.
    small = functools.partial(peers.Quota, rate=1, burst=peers.HELLO_BYTES)
    monkeypatch.setattr(server, "Quota", small)
    held = SimpleNamespace(sleep=waited.append, monotonic=time.monotonic)
    monkeypatch.setattr(session, "time", held)
    _, address = serve()
    control = connect(address).open_control(hello())
    assert waited == [], "a hello may come at once"
    control.send(report(1))
    until(lambda: waited)
    assert waited[0] > 0


# ---- the log -------------------------------------------------------------------------


def say(lines, name, text="refused", times=1, **options):
    for _ in range(times):
        lines.log(logger, logging.INFO, island(name), text, **options)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of this logger: threads of other tests may still end, and say so."""
    return [r.getMessage() for r in caplog.records if r.name == logger.name]


def test_a_peer_has_some_lines_then_one_a_minute_which_counts_the_others(clock, caplog):
    lines = RateLimitedLog()
    say(lines, "a", times=5000)
    assert told(caplog) == ["refused"] * AT_ONCE
    clock.now += EVERY_S
    say(lines, "a", times=3)
    assert told(caplog)[AT_ONCE:] == [
        f"refused; {5000 - AT_ONCE} more lines about island a were left out"
    ]
    caplog.clear()
    clock.now += EVERY_S
    say(lines, "a")
    assert "; 2 more lines" in caplog.text, "counted anew"
    say(lines, "b")
    assert told(caplog)[1:] == ["refused"], "another peer has its own"


def test_what_is_kept_and_written_is_bounded(clock, caplog):
    lines = RateLimitedLog()
    for number in range(MOST_KNOWN + 50):
        say(lines, f"i{number}")
    assert len(lines._known) == MOST_KNOWN
    caplog.clear()
    say(lines, "a", "x" * 10 * MOST_CHARS)
    assert len(told(caplog)[0]) == MOST_CHARS
    for _ in range(2 * AT_ONCE):
        lines.log(logger, logging.DEBUG, island("b"), "busy")
    say(lines, "b", "a level that is not logged costs no line")
    assert told(caplog)[1:] == ["a level that is not logged costs no line"]
    try:
        raise OSError("disk")
    except OSError:
        say(lines, "c", times=3 * AT_ONCE, trace=True)
    assert caplog.text.count("OSError: disk") == AT_ONCE


def test_calls_streams_and_transfers_share_the_lines_of_their_peer(
    serve, connect, handlers, tls, clock, caplog, monkeypatch
):
    _, address = serve(tls=tls["coordinator"])

    def refuse(hello, session):
        raise Refused("no", "not today")

    monkeypatch.setattr(handlers, "connect", refuse)
    client = connect(address, tls=tls["island"])
    for number in range(AT_ONCE):
        with pytest.raises(Refused, match="this is for the operator"):
            client.steer(Steer(how="admit", island=f"i{number}"), WAIT_S)
        with pytest.raises(Refused, match="not today"):
            client.open_control(hello(session=f"s{number}"))
        with pytest.raises(VersionGone):
            client.transfers.fetch(fetch_request(want=Version(1, 9)), max_bytes=8)
    whose = {"server", "session", "bulk_server"}
    about = [name for r in caplog.records if (name := r.name.split(".")[-1]) in whose]
    assert len(about) == AT_ONCE
    assert set(about) == whose
    clock.now += EVERY_S
    with pytest.raises(Refused):
        client.steer(Steer(how="admit", island="more"), WAIT_S)
    assert f"; {2 * AT_ONCE} more lines about island a were left out" in caplog.text


SOON_S, LATE_S = 0.05, WAIT_S


def test_items_come_out_as_they_went_in_and_their_bytes_are_bounded():
    queue = ByteQueue(1000)
    for item in (b"a", b"bb", b""):
        assert queue.put(item)
    assert [queue.get() for _ in range(3)] == [b"a", b"bb", b""]
    assert queue.held_bytes == 0
    assert queue.get(SOON_S) is None
    assert queue.put(bytes(900))
    assert not queue.put(bytes(100))
    assert queue.held_bytes < 1000
    queue.get()
    assert queue.put(bytes(5000)), "one item is taken whatever its size"
    assert not queue.put(b"")
    queue.get()
    assert 0 < sum(queue.put(b"") for _ in range(1000)) < 100, "empty ones, too"
    queue.close(discard=True)
    assert queue.held_bytes == 0
    with pytest.raises(QueueClosed):
        queue.get()


def test_who_waits_at_a_queue_gets_room_an_item_or_its_end():
    queue = ByteQueue(100)
    with ThreadPoolExecutor(1) as pool:

        def waiting(work, *arguments, **options):
            begun = pool.submit(work, *arguments, **options)
            until(lambda: queue._condition._waiters)
            return begun

        queue.put(bytes(90))
        put = waiting(queue.put, b"next", wait=True)
        queue.get()
        assert put.result(LATE_S)
        assert queue.get() == b"next"
        got = waiting(queue.get)
        queue.put(bytes(90))
        assert got.result(LATE_S) == bytes(90)
        queue.put(bytes(90))
        put = waiting(queue.put, b"b", wait=True)
        queue.close()
        with pytest.raises(QueueClosed):
            put.result(LATE_S)
    with ThreadPoolExecutor(1) as pool:
        queue = ByteQueue(100)
        got = waiting(queue.get)
        queue.close()
        with pytest.raises(QueueClosed):
            got.result(LATE_S)


@pytest.fixture
def watch():
    made = IdleWatch("watch")
    yield made
    made.close(LATE_S)


def test_a_watch_looks_at_its_guards_when_one_may_expire(watch, monkeypatch):
    """Not at all of them, whenever one is added."""
    looks, expires = [], peers.Guard.expires.fget
    counted = property(lambda guard: looks.append(guard) or expires(guard))
    monkeypatch.setattr(peers.Guard, "expires", counted)
    with contextlib.ExitStack() as guards:
        for number in range(200):
            guards.enter_context(watch.guard(LATE_S + number, pytest.fail))
            time.sleep(0.001)
    assert len(looks) < 2000


def expire_another(watch, clock, limit_s):
    """Lets `limit_s` go by, and the watch see it."""
    other = threading.Event()
    with watch.guard(limit_s, other.set):
        clock.now += limit_s
        assert other.wait(LATE_S)


def test_a_guard_that_is_over_never_expires(watch, clock):
    over = threading.Event()
    with watch.guard(SOON_S, over.set):
        pass
    for _ in range(2):  # the first could expire just before it
        expire_another(watch, clock, SOON_S)
    assert not over.is_set()


def test_what_ends_a_guard_is_done_before_the_guard_is_over(watch):
    """Else it would end what is guarded next, such as another transfer."""
    ending, over, order = threading.Event(), threading.Event(), []

    def end():
        ending.set()
        over.wait(SOON_S)
        order.append("ended")

    with watch.guard(SOON_S, end):
        assert ending.wait(LATE_S)
    order.append("over")
    over.set()
    assert order == ["ended", "over"]


def test_no_more_tasks_run_at_a_time_than_there_are_threads():
    pool, go = DaemonPool(2, "pool"), threading.Event()
    barrier = threading.Barrier(3, timeout=LATE_S)

    def work(number):
        if number < 2:
            barrier.wait()
        go.wait(LATE_S)
        return threading.current_thread().name

    tasks = [pool.submit(work, number) for number in range(5)]
    barrier.wait()
    assert not any(task.done() for task in tasks)
    assert [task.running() for task in tasks] == [True, True, False, False, False]
    go.set()
    assert len({task.result(LATE_S) for task in tasks}) == 2
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(LATE_S)
    pool.close(LATE_S)
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.submit(divmod, 7, 2)


@pytest.mark.parametrize("others", [0, 1])
def test_a_task_whose_thread_cannot_be_started_waits_for_the_others(
    monkeypatch, others
):
    """Without any it is refused, and forgotten."""
    pool, go, ran = DaemonPool(2, "pool"), threading.Event(), []
    for _ in range(others):
        pool.submit(go.wait, LATE_S)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        if others:
            waiting = pool.submit(ran.append, "later")
        else:
            with pytest.raises(RuntimeError, match="start new thread"):
                pool.submit(ran.append, "refused")
            waiting = None
    go.set()
    (waiting or pool.submit(ran.append, "later")).result(LATE_S)
    pool.close(LATE_S)
    assert ran == ["later"]


def test_threads_of_a_burst_are_given_back():
    pool, all_run = DaemonPool(100, "pool"), threading.Barrier(61)
    running = [pool.submit(all_run.wait, LATE_S) for _ in range(60)]
    all_run.wait(LATE_S)
    for one in running:
        one.result(LATE_S)
    until(lambda: len(pool._threads) <= peers.KEPT_IDLE)
    assert pool.submit(int).result(LATE_S) == 0
    pool.close(LATE_S)


def test_an_idle_thread_holds_nothing():
    class Payload:
        pass

    pool, payload = DaemonPool(1, "pool"), Payload()
    freed = threading.Event()
    held = weakref.ref(payload, lambda _: freed.set())
    pool.submit(id, payload).result(LATE_S)
    del payload
    assert freed.wait(LATE_S)
    assert held() is None
    pool.close(LATE_S)
