"""What came in is acted upon at the next boundary, unless it is put off."""

from diloco_jax.island.decisions import LiveDecisions
from diloco_jax.island.mailbox import Arrival, Mailbox
from diloco_jax.protocol.values import Version


def arrival(fragment, number):
    return Arrival(fragment=fragment, version=Version(1, number), publishes=(("x",),))


def plan_of(inbox):
    return inbox.takes, [a.fragment for a in inbox.arrivals]


def test_live_never_waits():
    mailbox = Mailbox()
    decisions = LiveDecisions(mailbox, lambda: False)
    assert plan_of(decisions.at(0, stepping=True)) == ({}, [])
    mailbox.request_take(1, 5)
    mailbox.deliver(arrival(0, 1), 0)
    assert plan_of(decisions.at(0, stepping=True)) == ({1: 5}, [0])


def test_a_take_that_is_put_off_comes_as_many_steps_later():
    mailbox = Mailbox()
    decisions = LiveDecisions(mailbox, lambda: False)
    mailbox.request_take(1, 5, after=2)
    assert decisions.at(3, stepping=True).takes == {}
    mailbox.request_take(1, 5, after=2)  # Asked again: it is on its way.
    assert decisions.at(3, stepping=True).takes == {}
    mailbox.request_take(0, 6)
    assert decisions.at(4, stepping=True).takes == {0: 6}
    assert decisions.at(5, stepping=True).takes == {1: 5}
    assert decisions.at(6, stepping=True).takes == {}


def test_a_take_that_is_put_off_comes_at_once_when_no_steps_follow():
    mailbox = Mailbox()
    decisions = LiveDecisions(mailbox, lambda: False)
    mailbox.request_take(1, 5, after=2)
    assert decisions.at(3, stepping=True).takes == {}
    assert decisions.at(3, stepping=False).takes == {1: 5}
    mailbox.request_take(1, 6, after=2)
    assert decisions.at(4, stepping=True).takes == {}
    mailbox.stop()
    assert decisions.at(5, stepping=True).takes == {1: 6}, "as it hears of it"


def test_takes_that_are_put_off_end_with_their_term():
    mailbox = Mailbox()
    decisions = LiveDecisions(mailbox, lambda: False)
    mailbox.request_take(1, 5, after=2)
    assert decisions.at(3, stepping=True).takes == {}
    mailbox.new_term(2)
    assert decisions.at(9, stepping=True).takes == {}
