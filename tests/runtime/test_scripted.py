"""The script of the runtime tests waits for what it has, and for nothing else."""

import threading

import coordinator_says as says
import pytest
from scripted import ScriptedDecisions, ScriptError

from diloco_jax.island.mailbox import Arrival, Mailbox
from diloco_jax.protocol.values import Version


def scripted(mailbox, *, cycle=4, fragments=2, overlap=1, patience_s=10.0):
    return ScriptedDecisions(
        mailbox,
        steps_per_cycle=cycle,
        fragments=fragments,
        overlap_steps=overlap,
        patience_s=patience_s,
    )


def arrival(fragment, number):
    return Arrival(fragment=fragment, version=Version(1, number), publishes=(("x",),))


def plan_of(decision):
    takes = {take.fragment: take.tick for take in decision.takes}
    return takes, [adoption.fragment for adoption in decision.adoptions]


def test_script_takes_and_adopts_at_its_own_steps():
    mailbox = Mailbox()
    decisions = scripted(mailbox)
    says.take(mailbox, 0, 1)  # Early: it is due at step 2.
    assert plan_of(decisions.at(0, stepping=True)) == ({}, [])
    assert plan_of(decisions.at(1, stepping=True)) == ({}, [])
    assert plan_of(decisions.at(2, stepping=True)) == ({0: 1}, [])
    mailbox.deliver(arrival(0, 1), 0)
    assert plan_of(decisions.at(3, stepping=True)) == ({}, [0])
    says.take(mailbox, 1, 2)
    assert plan_of(decisions.at(4, stepping=True)) == ({1: 2}, [])


def test_the_script_puts_nothing_off():
    mailbox = Mailbox()
    decisions = scripted(mailbox)
    says.take(mailbox, 0, 1, after=2)
    assert [take.after for take in decisions.at(2, stepping=True).takes] == [0]


def test_script_waits_for_request_and_arrival():
    mailbox = Mailbox()
    decisions = scripted(mailbox)
    decisions.at(0, stepping=True)
    later = threading.Timer(0.05, says.take, (mailbox, 0, 1))
    later.start()
    assert plan_of(decisions.at(2, stepping=True)) == ({0: 1}, [])
    threading.Timer(0.05, mailbox.deliver, (arrival(0, 1), 0)).start()
    assert plan_of(decisions.at(3, stepping=True)) == ({}, [0])


def test_without_overlap_the_answer_comes_at_the_same_boundary():
    mailbox = Mailbox()
    decisions = scripted(mailbox, overlap=0)
    says.take(mailbox, 0, 1)
    first = decisions.at(2, stepping=True)
    assert (plan_of(first), first.again) == (({0: 1}, []), True)
    mailbox.deliver(arrival(0, 1), 0)
    second = decisions.at(2, stepping=True)
    assert (plan_of(second), second.again) == (({}, [0]), False)


def test_script_has_a_deadline():
    decisions = scripted(Mailbox(), patience_s=0.01)
    with pytest.raises(ScriptError, match="take request of tick 1"):
        decisions.at(2, stepping=True)


def test_adoptions_due_come_before_the_flush_takes():
    mailbox = Mailbox()
    decisions = scripted(mailbox)
    says.take(mailbox, 0, 1)
    decisions.at(2, stepping=True)
    says.take(mailbox, 1, 2)
    mailbox.deliver(arrival(0, 1), 0)
    assert plan_of(decisions.at(2, stepping=False)) == ({1: 2}, [0])
    mailbox.deliver(arrival(1, 1), 0)
    assert plan_of(decisions.at(2, stepping=False)) == ({}, [1])


def test_stop_ends_the_wait_for_a_request():
    mailbox = Mailbox()
    decisions = scripted(mailbox)
    says.stop(mailbox)
    assert plan_of(decisions.at(2, stepping=True)) == ({}, [])
