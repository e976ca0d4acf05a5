"""Hosts of an island wait for each other where a collective would not wait long."""

import contextlib
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from types import SimpleNamespace

import jax
import msgspec
import pytest
from link_support import Store

from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.placement import Deadlines
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.island import hosts as hosts_module
from diloco_jax.island import world as island_hosts
from diloco_jax.island.host import Host, introduction
from diloco_jax.island.hosts import (
    Begin,
    FollowDecisions,
    JoinVersions,
    LeaveWatch,
    Moved,
    Orders,
    OrderThread,
    SharedDecisions,
)
from diloco_jax.island.link import ending_of
from diloco_jax.island.mailbox import Arrival, Mailbox
from diloco_jax.island.world import Hosts, HostsError
from diloco_jax.protocol.island.boundary import Decision, Ending
from diloco_jax.protocol.island.conversation import Fetch
from diloco_jax.protocol.messages import ResendRequest, Version
from diloco_jax.wire.errors import ConnectionLost, Refused, VersionGone

PATIENCE_S = 30.0
FIELD = "placement.compile_budget_s"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(island_hosts, "MEETING_POLL_S", 0.01)


def never():
    return False


def here(fragment, version, publishes=((),)):
    return Arrival(fragment=fragment, version=version, publishes=publishes)


def test_nobody_goes_on_before_all_are_here():
    store, here = Store(), threading.Barrier(2)
    came = []

    def early(index):
        here.wait(PATIENCE_S)
        Hosts(store, index, 3).meet("compiled", PATIENCE_S, never, FIELD)
        return list(came)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(early, index) for index in (0, 2)]
        with pytest.raises(HostsError, match="host 1 of this island"):
            # By then the early ones have come, too.
            Hosts(store, 0, 3).meet("compiled", 0.1, never, FIELD)
        assert not any(one.done() for one in waiting)
        came.append("host 1")
        Hosts(store, 1, 3).meet("compiled", PATIENCE_S, never, FIELD)
        assert [one.result(PATIENCE_S) for one in waiting] == [["host 1"]] * 2


def test_who_did_not_come_in_time_is_named_with_the_remedy():
    with pytest.raises(
        HostsError,
        match=r"host 1 .* 'compiled' within 0\.05 s of host 0.*compile_budget_s",
    ):
        Hosts(Store(), 0, 2).meet("compiled", 0.05, never, FIELD)


def test_an_island_that_must_end_does_not_wait_on():
    began = time.monotonic()
    with pytest.raises(HostsError):
        Hosts(Store(), 0, 2).meet("ready", PATIENCE_S, lambda: True, FIELD)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_who_cannot_go_on_keeps_its_exit_code_among_hosts_that_met(monkeypatch):
    """Leaving in order would wait for the others, and abort: with 134."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    assert island_hosts.end_alone(2) == 2
    assert ended == []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    island_hosts.end_alone(2)
    assert ended == [2]


def test_host_0_hears_that_another_host_is_to_end(monkeypatch):
    monkeypatch.setattr(hosts_module, "LOOK_S", 0.01)
    store, asked = Store(), queue.Queue()
    watch = LeaveWatch(Hosts(store, 0, 2), Mailbox(), asked.put)
    watch.start()
    with pytest.raises(queue.Empty):
        asked.get(timeout=0.1)
    Hosts(store, 1, 2).tell("leave", b"host 1: preempted")
    assert asked.get(timeout=PATIENCE_S) == "host 1: preempted"
    watch.close(PATIENCE_S)
    assert asked.empty()


class Asked:
    """What a host has where it is asked to end."""

    name, deadlines, _told = "pair", Deadlines(PATIENCE_S), False

    def __init__(self, index, notice_s=0.0, store=None) -> None:
        self.hosts, self.mailbox = Hosts(store or Store(), index, 2), Mailbox()
        self.follows, self._noticed = index > 0, threading.Lock()
        placement = SimpleNamespace(notice_s=notice_s)
        self.config = SimpleNamespace(placement=placement)


STOPPED = Ending(0, "asked to end by SIGTERM", "stopped")


@pytest.mark.parametrize(
    ("index", "notice_s", "told"),
    [
        (0, 0.0, STOPPED),
        (0, 5.0, Ending(1, "preempted (SIGTERM)", "preempted")),
        (1, 5.0, b"host 1: SIGTERM"),
    ],
)
def test_host_0_decides_when_an_island_that_is_asked_to_end_does(index, notice_s, told):
    asked = Asked(index, notice_s)
    for source in ("SIGTERM", "the metadata server"):
        Host.asked_to_end(asked, source)
    if index:
        assert asked.hosts.hear("leave", PATIENCE_S) == told
        assert asked.mailbox.ending is None
        return
    while asked.mailbox.ending is None:
        asked.mailbox.wait(PATIENCE_S)
        asked.mailbox.decide()
    assert asked.mailbox.ending == told


@pytest.mark.parametrize("index", [0, 1])
def test_host_0_meets_one_that_still_compiles_though_the_island_is_to_end(index):
    """Of another host, an ending says that its own threads failed."""
    host, looks = Asked(index), iter([None, None, b""])
    host.hosts.hear = lambda *_: next(looks)
    host.mailbox.end(*STOPPED)
    with pytest.raises(HostsError) if index else contextlib.nullcontext():
        Host._meet(host, "compiled", PATIENCE_S, "compile")
    assert len(list(looks)) == 2 * index


@pytest.mark.parametrize(
    ("error", "ending", "told"),
    [
        (Refused("config", "nobody"), None, Ending(3, "nobody (config)", "refused")),
        (Refused("finished", "over"), STOPPED, ending_of(Refused("finished", "over"))),
        (ConnectionLost("away"), STOPPED, STOPPED),
        (ConnectionLost("away"), None, None),
    ],
)
def test_an_end_before_the_first_step_is_that_of_all_hosts(error, ending, told):
    store = Store()
    first, second = Asked(0, store=store), Asked(1, store=store)
    if ending is not None:
        first.mailbox.end(*ending)
    with ThreadPoolExecutor(1) as pool:
        wait_s = PATIENCE_S if told else 0.0
        heard = pool.submit(Host._hear, second, "joined", JoinVersions, wait_s)
        with pytest.raises(type(error)), Host._telling(first, "joined"):
            raise error
        with pytest.raises(HostsError):
            heard.result(PATIENCE_S)
    assert first._told == second._told == (told is not None)
    assert second.mailbox.ending == told


PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)


def test_hosts_with_different_configs_are_told_apart():
    config = Config(islands={"pair": IslandConfig(hosts=2)})
    other = config.replace("islands.pair.remat", "full")
    whos = [
        introduction(c, "pair", PLAN, 1, "s", own_data=False) for c in (config, other)
    ]
    host = Asked(1)
    host._who, host.region, host._hear = whos[1], None, partial(Host._hear, host)
    host.config.placement.away_s = 0.0
    begin = Begin(
        who=whos[0], run_id="r", lookahead=2, gives=False, versions=(), workers=()
    )
    host.hosts.tell("begin", msgspec.msgpack.encode(begin))
    with pytest.raises(ConfigError) as refused:
        Host._hear_begin(host)
    for shown in (
        "host 1 of island 'pair' has another config or model than host 0",
        "remat: 'full' here, 'none' there",
    ):
        assert shown in str(refused.value)


def test_host_0_is_no_further_than_decisions_are_kept_for_one_that_stands_still(
    monkeypatch,
):
    """Without data it looks for some many times in a time budget."""
    monkeypatch.setattr(hosts_module, "BATCH", 2)
    store, told, made = Store(), iter(range(9)), []
    source = SimpleNamespace(
        at=lambda step, stepping: Decision(term=next(told)), wait=None
    )
    first = SharedDecisions(source, Hosts(store, 0, 2), 2, PATIENCE_S)
    second = FollowDecisions(Hosts(store, 1, 2), Mailbox(), 2, PATIENCE_S)

    def decide():
        made.extend(first.at(n, stepping=True).term for n in range(9))

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(decide)
        with pytest.raises(FutureTimeout):
            ahead.result(0.2)
        found = [second.at(n, stepping=True).term for n in range(9)]
        ahead.result(PATIENCE_S)
    assert found == made == [max(boundary - 2, 0) for boundary in range(9)]
    assert store.keys() == [f"decision/{number}" for number in (10, 8, 9)]


def test_a_host_that_does_not_come_on_is_named(monkeypatch):
    monkeypatch.setattr(hosts_module, "BATCH", 2)
    source = SimpleNamespace(at=lambda step, stepping: Decision(), wait=None)
    first = SharedDecisions(source, Hosts(Store(), 0, 2), 2, 0.01)
    for number in range(2):
        first.at(number, stepping=True)
    with pytest.raises(HostsError, match="host 1 is 2 boundaries behind at step 2"):
        first.at(2, stepping=True)


def test_a_follower_hears_of_every_order_however_many_come_while_it_fetches():
    store, mailbox, followers = Store(), Mailbox(), Mailbox()
    orders = Orders(Hosts(store, 0, 2), mailbox, PATIENCE_S)
    fetches, resent, moved = threading.Event(), [], []

    def fetch(fetch):
        assert fetches.wait(PATIENCE_S)
        return here(fetch.fragment, fetch.want)

    def resend(request):
        resent.append((request.fragment, request.tick))

    deadlines = Deadlines(PATIENCE_S)
    host = Hosts(store, 1, 2)
    thread = OrderThread(host, followers, fetch, resend, moved.append, deadlines)
    thread.start()
    first = orders.give(Fetch(0, Version(1, 1), None, None))
    again = [(fragment, 7) for fragment in range(100)]
    for fragment, tick in again:
        orders.give(ResendRequest(fragment=fragment, tick=tick))
    orders.give(Moved(workers=("127.0.0.1:7", "127.0.0.1:8")))
    fetches.set()
    orders.await_answers(first, here(0, Version(1, 1)))
    last = orders.give(Fetch(1, Version(1, 2), Version(1, 1), Version(1, 1)))
    orders.await_answers(last, here(1, Version(1, 2)))
    assert resent == again
    assert moved == [("127.0.0.1:7", "127.0.0.1:8")]
    assert followers.arrivals.pick(1, Version(1, 2)).fragment == 1
    assert store.keys() == [], "what was read is forgotten"
    thread.close(PATIENCE_S)


def test_an_order_is_awaited_as_long_as_all_before_it_may_take():
    """Host 0 gives several while the coordinator is away, and a host does one after the
    other."""
    store, mailbox = Store(), Mailbox()
    orders = Orders(Hosts(store, 0, 2), mailbox, 0.3)

    def fetch(fetch):
        time.sleep(0.2)
        raise ConnectionLost("away")

    host = Hosts(store, 1, 2)
    thread = OrderThread(
        host, Mailbox(), fetch, lambda _: None, lambda _: None, Deadlines(PATIENCE_S)
    )
    thread.start()
    numbers = [
        orders.give(Fetch(fragment, Version(1, 1), None, None)) for fragment in range(4)
    ]
    for number in reversed(numbers):
        orders.await_answers(number, None)
    thread.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("other", "own", "raised"),
    [
        ({"publishes": ((),)}, True, None),
        ({"anchor": ()}, True, VersionGone),
        (None, True, ConnectionLost),
        (None, False, None),
    ],
)
def test_hosts_that_did_not_get_the_same_fetch_again(other, own, raised):
    """None: the coordinator refuses the other one. A host that did not get its own part
    says itself why."""
    store, mailbox = Store(), Mailbox()
    orders, want = Orders(Hosts(store, 0, 2), mailbox, PATIENCE_S), Version(1, 2)

    def fetch(_):
        if other is None:
            raise Refused("fenced", "stop this process")
        return Arrival(fragment=0, version=want, **other)

    thread = OrderThread(
        Hosts(store, 1, 2),
        Mailbox(),
        fetch,
        lambda *_: None,
        lambda _: None,
        Deadlines(PATIENCE_S),
    )
    thread.start()
    number = orders.give(Fetch(0, want, Version(1, 1), Version(1, 1)))
    with contextlib.nullcontext() if raised is None else pytest.raises(raised):
        orders.await_answers(number, here(0, want) if own else None)
    thread.close(PATIENCE_S)


def test_hosts_of_another_folder_are_not_heard():
    """A world that its island did not make has other keys, and other islands' keys."""
    store = Store()
    here, again = Hosts(store, 0, 1, "diloco/a/1/"), Hosts(store, 0, 1, "diloco/a/2/")
    here.tell("begin", b"first")
    assert again.hear("begin", 0.01) is None
    again.tell("begin", b"second")
    assert here.hear("begin", 0.01) == b"first"
    here.meet("ready", 1.0, never, FIELD)
    here.forget("begin")
    assert store.keys() == ["diloco/a/1/ready/0", "diloco/a/2/begin"]
