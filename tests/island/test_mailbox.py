import threading

from diloco_jax.island.mailbox import MAX_CHAIN, Arrival, Mailbox, Status
from diloco_jax.protocol.messages import TakeVerdict
from diloco_jax.protocol.values import Record, Span, Version


def publish(number, fragment=0):
    return Arrival(
        fragment=fragment, version=Version(1, number), publishes=((f"v{number}",),)
    )


def verdict(tick):
    return TakeVerdict(
        fragment=0, tick=tick, verdict="merged", reason="", version=Version()
    )


def test_everything_is_collected_once():
    mailbox = Mailbox()
    mailbox.request_take(0, 1)
    mailbox.request_take(0, 4)
    mailbox.judge(verdict(1))
    mailbox.judge(verdict(1))
    mailbox.grant(Span(0, 8))
    mailbox.progress(5000, records_through=0)
    inbox = mailbox.collect()
    assert inbox.takes == {0: 4}
    assert inbox.verdicts == (verdict(1),)
    assert inbox.grants == (Span(0, 8),)
    assert inbox.others_tokens == 5000
    later = mailbox.collect()
    assert (later.takes, later.verdicts, later.grants) == ({}, (), ())
    assert later.others_tokens == 5000


def test_an_older_request_for_a_take_comes_too_late():
    mailbox = Mailbox()
    mailbox.request_take(0, 4)
    mailbox.request_take(0, 1)
    assert mailbox.collect().takes == {0: 4}
    mailbox.request_take(0, 1)
    assert mailbox.collect().takes == {}
    mailbox.request_take(0, 4)  # The coordinator asks again for what it has not got.
    assert mailbox.collect().takes == {0: 4}


def test_publishes_of_a_fragment_become_one_chain():
    mailbox = Mailbox()
    for arrival in (publish(1), publish(2), publish(7, fragment=3)):
        assert mailbox.deliver(arrival, 0)
    first, second = mailbox.collect().arrivals
    assert first.version == Version(1, 2)
    assert first.publishes == (("v1",), ("v2",))
    assert second.fragment == 3


def test_an_anchor_in_full_replaces_what_waits():
    mailbox = Mailbox()
    mailbox.deliver(publish(1), 0)
    full = Arrival(fragment=0, version=Version(2, 0), anchor=("A",))
    mailbox.deliver(full, 0)
    mailbox.deliver(publish(3), 0)
    (arrival,) = mailbox.collect().arrivals
    assert (arrival.anchor, arrival.publishes) == (("A",), (("v3",),))


def test_a_chain_is_bounded_until_the_loop_collects():
    mailbox = Mailbox()
    assert all(mailbox.deliver(publish(n), 0) for n in range(MAX_CHAIN))
    assert not mailbox.deliver(publish(MAX_CHAIN), 0)
    mailbox.collect()
    assert mailbox.deliver(publish(MAX_CHAIN), 0)


def test_records_are_kept_until_acknowledged():
    mailbox = Mailbox()
    records = tuple(Record(seq=n, kind="progress", step=0) for n in (1, 2, 3))
    mailbox.post(Status(phase="training", steps=7), records)
    assert mailbox.report(sent_through=1)[1] == records[1:]
    mailbox.progress(0, records_through=2)
    status, rest = mailbox.report(sent_through=0)
    assert (status.phase, status.steps, rest) == ("training", 7, records[2:])


def test_traffic_is_in_the_measures():
    mailbox = Mailbox()
    mailbox.count(bytes_up=3)
    mailbox.count(bytes_up=4, bytes_down=5)
    mailbox.post(Status(phase="training"))
    measures = mailbox.status().measures
    assert (measures.bytes_up, measures.bytes_down) == (7, 5)
    # Of the other hosts too, whose answers may overtake each other.
    for up in (9, 8):
        mailbox.count_of(1, {"bytes_up": up, "bytes_down": 1, "bytes_join": 2})
    measures = mailbox.status().measures
    assert (measures.bytes_up, measures.bytes_down, measures.bytes_join) == (16, 6, 2)
    assert mailbox.traffic() == {"bytes_up": 7, "bytes_down": 5, "bytes_join": 0}


def test_the_first_reason_to_end_stands():
    mailbox = Mailbox()
    mailbox.end(3, "another run", "refused")
    mailbox.end(0, "sigterm")
    assert mailbox.ending == (3, "another run", "refused")


def test_waiting_ends_with_news_and_with_the_deadline():
    mailbox = Mailbox()
    mailbox.wait(0.01)
    waiter = threading.Thread(target=mailbox.wait, args=(600,))
    waiter.start()
    mailbox.stop()
    waiter.join(60)
    assert not waiter.is_alive()
    mailbox.collect()
    mailbox.wait(0.01)


def test_a_new_term_makes_what_was_asked_and_judged_before_it_void():
    mailbox = Mailbox()
    mailbox.request_take(0, 4)
    mailbox.judge(verdict(4))
    mailbox.grant(Span(0, 8))
    mailbox.stop()
    mailbox.new_term(2)
    mailbox.request_take(1, 9)
    inbox = mailbox.collect()
    assert (inbox.term, inbox.takes, inbox.verdicts) == (2, {1: 9}, ())
    assert inbox.grants == (Span(0, 8),), "leases go on"
    assert not inbox.stop, "the new one says whether the run has its tokens"
    assert mailbox.collect().term == 0


def test_anchors_are_asked_for_once():
    mailbox = Mailbox()
    for fragment in (1, 0, 1):
        mailbox.request_anchor(fragment)
    assert mailbox.collect().anchors == (1, 0)
    assert mailbox.collect().anchors == ()


def test_the_status_says_what_a_coordinator_without_state_needs():
    mailbox = Mailbox()
    assert mailbox.status().versions == ()
    mailbox.deliver(publish(9, fragment=1), 0)
    assert mailbox.status().versions == (), "not before all are here"
    mailbox.post(Status(versions=(Version(1, 8), Version(1, 8))))
    assert mailbox.status().versions == (Version(1, 8), Version(1, 9))
    mailbox.collect()
    assert mailbox.status().versions == (Version(1, 8), Version(1, 9)), "under way"
    mailbox.post(Status(versions=(Version(1, 8), Version(2, 3))))
    assert mailbox.status().versions == (Version(1, 8), Version(2, 3))
    mailbox.heard(700, 40)
    mailbox.grant(Span(48, 56))
    mailbox.heard(650, 50)
    status = mailbox.status()
    assert (status.tokens, status.next_position) == (650, 56)
