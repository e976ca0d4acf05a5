"""Queues that are bounded, waits that end, threads that hold up nobody."""

import threading
import weakref

import pytest
from wire_support import WAIT_S, until

from diloco_jax.wire import limits
from diloco_jax.wire.errors import ConnectionLost
from diloco_jax.wire.limits import ByteQueue, DaemonPool, IdleWatch, QueueClosed

SOON_S, LATE_S = 0.05, WAIT_S


def waiting_at(queue, work):
    """Starts it; when it waits, returns the thread and where its result will be."""
    found, waits, wait = [], threading.Event(), queue._condition.wait

    def announced(timeout_s):
        waits.set()  # but nobody else gets at the queue until this thread waits
        return wait(timeout_s)

    queue._condition.wait = announced
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    assert waits.wait(LATE_S)
    return thread, found


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


def test_who_waits_for_room_gets_it():
    queue = ByteQueue(100)
    queue.put(bytes(90))
    thread, found = waiting_at(queue, lambda: queue.put(b"next", wait=True))
    assert not found
    queue.get()
    thread.join(LATE_S)
    assert found == [True]
    assert queue.get() == b"next"


def test_a_closed_queue_is_read_to_its_end_and_says_why():
    queue, first = ByteQueue(1000), ConnectionLost("first")
    queue.put(b"a")
    queue.close(first)
    queue.close(ConnectionLost("second"))
    with pytest.raises(QueueClosed):
        queue.put(b"b")
    assert queue.get() == b"a"
    with pytest.raises(QueueClosed) as raised:
        queue.get()
    assert raised.value.error is first


@pytest.mark.parametrize("waiting", ["get", "put"])
def test_closing_wakes_who_waits(waiting):
    queue = ByteQueue(100)

    def wait():
        try:
            return queue.get() if waiting == "get" else queue.put(b"b", wait=True)
        except QueueClosed:
            return "closed"

    if waiting == "put":
        queue.put(bytes(90))
    thread, found = waiting_at(queue, wait)
    queue.close()
    thread.join(LATE_S)
    assert found == ["closed"]


@pytest.fixture
def watch():
    made = IdleWatch("watch")
    yield made
    made.close(LATE_S)


def expire_another(watch, clock, limit_s):
    """Lets `limit_s` go by, and the watch see it."""
    other = threading.Event()
    with watch.guard(limit_s, other.set):
        clock.now += limit_s
        assert other.wait(LATE_S)


def test_what_makes_no_progress_is_ended(watch):
    ended = threading.Event()
    with watch.guard(SOON_S, ended.set) as guard:
        assert ended.wait(LATE_S)
    assert guard.expired


def test_what_is_touched_is_not(watch, clock):
    ended = threading.Event()
    with watch.guard(10 * SOON_S, ended.set) as guard:
        # Others expire one after the other, for twice as long as this one may idle.
        for _ in range(20):
            expire_another(watch, clock, SOON_S)
            guard.touch()
    assert not guard.expired
    assert not ended.is_set()


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


def test_a_pool_gives_results_and_errors():
    pool = DaemonPool(2, "pool")
    assert pool.submit(divmod, 7, 2).result(LATE_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(LATE_S)
    assert pool.submit(divmod, 9, 2).result(LATE_S) == (4, 1), "its thread goes on"
    pool.close(LATE_S)
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.submit(divmod, 7, 2)


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
    pool.close(LATE_S)


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
    until(lambda: len(pool._threads) <= limits.KEPT_IDLE)
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
