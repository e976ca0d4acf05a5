"""The lock around the conversation: waits, arrivals and traffic."""

import math
import threading

import coordinator_says as says
import pytest

from diloco_jax.island.mailbox import (
    COUNTED,
    Arrival,
    Arrivals,
    LiveDecisions,
    Mailbox,
    NotHereError,
)
from diloco_jax.protocol.island.conversation import MAX_CHAIN
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import Finished, Published, Version

WAIT_S = 60.0


def publish(number, fragment=0):
    return Arrival(
        fragment=fragment, version=Version(1, number), publishes=((f"v{number}",),)
    )


def test_waiting_ends_with_news_and_with_the_deadline():
    mailbox = Mailbox()
    mailbox.wait(0.01)
    waiter = threading.Thread(target=mailbox.wait, args=(600,))
    waiter.start()
    says.stop(mailbox)
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert mailbox.decide().stop
    mailbox.wait(0.01)


def test_a_delivery_waits_for_the_loop():
    mailbox = Mailbox()
    assert all(mailbox.deliver(publish(n), 0) for n in range(MAX_CHAIN))
    assert not mailbox.deliver(publish(MAX_CHAIN), 0)
    delivery = threading.Thread(
        target=mailbox.deliver, args=(publish(MAX_CHAIN), WAIT_S)
    )
    delivery.start()
    mailbox.decide()
    delivery.join(WAIT_S)
    assert not delivery.is_alive()
    ((_, version),) = mailbox.decide().adoptions
    assert len(mailbox.arrivals.pick(0, version).publishes) == MAX_CHAIN + 1


def test_publishes_of_a_fragment_become_one_chain():
    arrivals = Arrivals()
    for arrival in (publish(1), publish(2), publish(3), publish(7, fragment=3)):
        arrivals.put(arrival)
    first = arrivals.pick(0, Version(1, 2))
    assert first.version == Version(1, 2)
    assert first.publishes == (("v1",), ("v2",))
    assert arrivals.pick(0, Version(1, 3)).publishes == (("v3",),)
    assert arrivals.pick(3, Version(1, 7)).fragment == 3


def test_an_anchor_in_full_replaces_what_waits():
    arrivals = Arrivals()
    arrivals.put(publish(1))
    arrivals.put(Arrival(fragment=0, version=Version(2, 0), anchor=("A",)))
    arrivals.put(Arrival(fragment=0, version=Version(2, 1), publishes=(("v",),)))
    arrival = arrivals.pick(0, Version(2, 1))
    assert (arrival.anchor, arrival.publishes) == (("A",), (("v",),))


def test_what_not_all_hosts_have_is_dropped():
    arrivals = Arrivals()
    for number in (1, 2):
        arrivals.put(publish(number))
    arrivals.drop_after(0, Version(1, 1))
    arrivals.put(Arrival(fragment=0, version=Version(1, 3), publishes=(("w",),)))
    assert arrivals.pick(0, Version(1, 3)).publishes == (("v1",), ("w",))
    arrivals.put(publish(4))
    arrivals.drop_after(0, None)
    with pytest.raises(NotHereError, match=r"fragment 0 .* version \(1, 4\)"):
        arrivals.pick(0, Version(1, 4))


def test_traffic_is_in_the_measures():
    mailbox = Mailbox()
    mailbox.count(bytes_up=3)
    mailbox.count(bytes_up=4, bytes_down=5)
    mailbox.post(Status(phase="training"))
    measures = mailbox.status().measures
    assert (measures.bytes_up, measures.bytes_down) == (7, 5)
    # Of the other hosts too, whose answers may overtake each other.
    for up in (9, 8):
        told = dict.fromkeys(COUNTED, 0) | {"bytes_up": up, "bytes_down": 1}
        mailbox.count_of(1, told | {"bytes_join": 2}, ())
    measures = mailbox.status().measures
    assert (measures.bytes_up, measures.bytes_down, measures.bytes_join) == (16, 6, 2)
    counted = dict.fromkeys(COUNTED, 0) | {"bytes_up": 7, "bytes_down": 5}
    assert mailbox.counted() == (counted, ())
    mailbox.tell_trial(loss=2.5, memory_bytes=math.nan)
    assert mailbox.status().measures.trial == {"loss": 2.5}


def test_the_last_versions_are_awaited_for_a_time():
    now, mailbox = 0.0, Mailbox(awaits_last=True)
    decisions = LiveDecisions(mailbox, lambda: False, 3.0, lambda: now)
    mailbox.post(Status(phase="stopped", versions=(Version(1, 1),)))
    mailbox.receive(Published(fragment=0, version=Version(1, 2)))
    mailbox.receive(Finished())
    found = []
    for now in (5.0, 7.9, 8.0, 8.1):  # noqa: B007
        decision = decisions.at(0, stepping=False)
        found.append((decision.finished, decision.lacking))
    assert found == [(False, ()), (False, ()), (False, ()), (True, (0,))]
