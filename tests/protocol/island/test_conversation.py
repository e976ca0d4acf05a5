"""Messages of the coordinator become decisions, each fact in one of them; fetches have
an order, and each goes on from a version."""

import coordinator_says as says
import pytest

from diloco_jax.protocol.island.boundary import Adoption, Ending
from diloco_jax.protocol.island.conversation import (
    JOIN_FETCHES,
    MAX_CHAIN,
    Conversation,
    Fetching,
    HostFetch,
    Wanted,
    agreed,
    gave_up_late,
    goes_back,
)
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import (
    Donor,
    DonorFailed,
    Finished,
    Published,
    Record,
    ResendRequest,
    Sources,
    Span,
    Version,
    Welcome,
)


@pytest.fixture
def told():
    return Conversation()


def takes_of(decision):
    return {take.fragment: take.tick for take in decision.takes}


def test_everything_is_decided_once(told):
    says.take(told, 0, 1)
    says.take(told, 0, 4)
    says.judge(told, 0, 1)
    says.judge(told, 0, 1)
    says.grant(told, Span(0, 8))
    says.progress(told, 5000, own_tokens=400)
    decision = told.decide()
    assert takes_of(decision) == {0: 4}
    assert decision.verdicts == (says.verdict(0, 1),)
    assert decision.grants == (Span(0, 8),)
    assert (decision.others_tokens, decision.heard) == (5000, 1)
    later = told.decide()
    assert (later.takes, later.verdicts, later.grants) == ((), (), ())
    assert later.others_tokens == 5000


def test_an_older_request_for_a_take_comes_too_late(told):
    says.take(told, 0, 4)
    says.take(told, 0, 1)
    assert takes_of(told.decide()) == {0: 4}
    says.take(told, 0, 1)
    assert takes_of(told.decide()) == {}
    says.take(told, 0, 4)  # The coordinator asks again for what it has not got.
    assert takes_of(told.decide()) == {0: 4}


def test_the_newest_version_that_is_here_is_adopted(told):
    told.arrived(0, Version(1, 1), 1)
    told.arrived(3, Version(1, 7), 1)
    told.arrived(0, Version(1, 2), 1)
    assert told.decide().adoptions == (
        Adoption(0, Version(1, 2)),
        Adoption(3, Version(1, 7)),
    )
    assert told.decide().adoptions == ()


def test_a_chain_is_bounded_until_the_loop_decides(told):
    for number in range(1, MAX_CHAIN + 1):
        assert told.has_room(0, 1)
        told.arrived(0, Version(1, number), 1)
    assert not told.has_room(0, 1)
    assert told.has_room(0, None), "an anchor in full replaces what waits"
    assert told.has_room(1, 1)
    told.arrived(0, Version(2, 1), None)
    assert told.has_room(0, MAX_CHAIN)
    told.arrived(0, Version(2, 2), MAX_CHAIN)
    assert not told.has_room(0, 1)
    told.decide()
    assert told.has_room(0, 1)


def test_bulk_work_is_left_to_the_shell(told):
    assert told.receive(ResendRequest(fragment=2, tick=5)) == (
        ResendRequest(fragment=2, tick=5),
    )
    version = Version(1, 9)
    verdict = says.verdict(2, 5, "merged", "", version)
    published = Published(fragment=2, version=version, verdict=verdict)
    assert told.receive(published) == (Wanted(2, version),)
    assert told.decide().verdicts == (verdict,)
    told.receive(Published(fragment=2, version=version))
    assert told.decide().verdicts == (), "it has none"
    assert says.welcome(told, 1, (version, Version(1, 8))) == (
        Wanted(0, version),
        Wanted(1, Version(1, 8)),
    )


def test_the_status_has_the_median_change_by_fragment(told):
    for fragment, change in ((1, 0.5), (1, 0.0), (0, 3.0), (1, 0.25), (1, 8.0)):
        version = Version(1, 9)
        told.receive(Published(fragment=fragment, version=version, change=change))
    assert told.status().changes == (3.0, 0.5)


def test_a_grant_that_is_repeated_counts_once(told):
    says.grant(told, Span(40, 48))
    says.grant(told, Span(40, 48))
    says.grant(told, Span(44, 52), offset=4)
    assert told.decide().grants == (Span(40, 48), Span(48, 52))
    assert told.status().sequences_granted == 12


def test_a_grant_that_is_missing_is_an_error(told):
    says.grant(told, Span(0, 8))
    with pytest.raises(ValueError, match="from sequence 9 on, but only 8 have arrived"):
        says.grant(told, Span(9, 16), offset=9)


def test_records_are_kept_until_acknowledged(told):
    records = tuple(Record(seq=n, kind="progress", step=0) for n in (1, 2, 3))
    told.post(Status(phase="training", steps=7), records)
    assert told.newest_record == 3
    assert told.unsent(1) == records[1:]
    says.progress(told, records_through=2)
    assert told.unsent(0) == records[2:]
    status = told.status()
    assert (status.phase, status.steps, status.records_through) == ("training", 7, 2)
    says.progress(told, records_through=3)
    assert told.newest_record == 0


def test_the_first_reason_to_end_stands(told):
    told.end(Ending(3, "another run", "refused"))
    told.end(Ending(0, "sigterm"))
    assert told.decide().ending == (3, "another run", "refused")


def test_an_island_is_let_go_only_once_it_is_about_to_leave(told):
    says.may_leave(told)  # Of another time: nothing was asked for yet.
    told.leave()
    assert not told.may_leave
    decision = told.decide()
    assert (decision.stop, decision.leaving, decision.finished) == (True, True, False)
    says.may_leave(told)
    assert told.may_leave


@pytest.mark.parametrize(
    "tell",
    [
        lambda told: says.take(told, 0, 1),
        lambda told: says.judge(told, 0, 1),
        lambda told: says.grant(told, Span(0, 8)),
        lambda told: says.anchor(told, 0),
        lambda told: says.stop(told),
        lambda told: says.finished(told),
        lambda told: says.welcome(told, 2),
        lambda told: told.arrived(0, Version(1, 1), 1),
        lambda told: told.leave(),
        lambda told: told.end(Ending(1, "a failure")),
    ],
    ids=range(10),
)
def test_a_loop_that_waits_is_woken_by(told, tell):
    says.welcome(told, 1)
    told.decide()
    says.progress(told, 7)
    assert not told.has_news, "progress is none"
    tell(told)
    assert told.has_news


def test_a_new_term_makes_what_was_asked_and_judged_before_it_void(told):
    says.welcome(told, 1)
    says.take(told, 0, 4)
    says.judge(told, 0, 4)
    says.grant(told, Span(0, 8))
    says.stop(told)
    says.welcome(told, 2)
    says.take(told, 1, 9)
    decision = told.decide()
    assert (decision.term, takes_of(decision)) == (2, {1: 9})
    assert decision.verdicts == ()
    assert decision.grants == (Span(0, 8),), "leases go on"
    assert not decision.stop, "the new one says whether the run has its tokens"
    assert told.decide().term == 0
    assert told.status().term == 2


@pytest.mark.parametrize(("terms", "term"), [((1, 0), 1), ((3,), 3)])
def test_the_first_term_of_a_process_is_no_new_one_nor_is_none(told, terms, term):
    says.take(told, 0, 4)
    for number in terms:
        says.welcome(told, number)
    assert (told.decide().term, told.status().term) == (0, term)


@pytest.mark.parametrize(("term", "is_named"), [(0, "x"), (1, "x"), (2, "y"), (3, "y")])
def test_a_term_is_named_as_its_last_welcome_says(told, term, is_named):
    for number, name in ((2, "x"), (term, "y")):
        told.receive(
            Welcome(run_id="r", term=number, resumed=False, versions=(), term_name=name)
        )
    assert (told.status().term, told.status().term_name) == (max(term, 2), is_named)


@pytest.mark.parametrize(
    ("term", "back"), [(0, False), (1, True), (2, True), (3, False), (4, False)]
)
def test_an_island_goes_back_to_no_earlier_term(term, back):
    welcome = Welcome(run_id="r", term=term, resumed=False, versions=())
    assert goes_back(3, welcome) == back
    assert not goes_back(0, welcome), "it knows of none yet"


def test_anchors_are_asked_for_once(told):
    for fragment in (1, 0, 1):
        says.anchor(told, fragment)
    assert [asked.fragment for asked in told.decide().anchors] == [1, 0]
    assert told.decide().anchors == ()


def test_the_status_says_what_a_coordinator_without_state_needs(told):
    assert told.status().versions == ()
    told.arrived(1, Version(1, 9), 1)
    assert told.status().versions == (), "not before all are here"
    told.post(Status(versions=(Version(1, 8), Version(1, 8))))
    assert told.status().versions == (Version(1, 8), Version(1, 9))
    told.decide()
    assert told.status().versions == (Version(1, 8), Version(1, 9)), "under way"
    told.post(Status(versions=(Version(1, 8), Version(2, 3))))
    assert told.status().versions == (Version(1, 8), Version(2, 3))
    says.progress(told, 700, next_position=40)
    says.grant(told, Span(48, 56))
    says.progress(told, 600, own_tokens=50, next_position=50)
    status = told.status()
    assert (status.tokens, status.own_tokens, status.next_position) == (650, 50, 56)
    versions = (Version(2, 8), Version(2, 9))
    back = Welcome(
        run_id="run-1", term=2, resumed=True, versions=versions, next_position=90
    )
    told.receive(back)
    assert told.status().next_position == 90


def over(told):
    """The run's end, after version 2 of fragment 1, of which version 1 is here."""
    told.post(Status(phase="stopped", versions=(Version(1, 1), Version(1, 1))))
    for fragment, number in ((0, 1), (1, 2)):
        told.receive(Published(fragment=fragment, version=Version(1, number)))
    told.receive(Finished())
    return told.decide()


@pytest.mark.parametrize("ends", ["arrives", "is given up", "is not awaited"])
def test_an_island_that_awaits_the_result_is_done_once_the_last_version(ends):
    told = Conversation(awaits_last=ends != "is not awaited")
    decision = over(told)
    if told._awaits_last:
        assert (decision.stop, decision.finished) == (True, False)
        if ends == "arrives":
            told.arrived(1, Version(1, 2), 1)
        else:
            told.give_up()
        assert told.has_news
        decision = told.decide()
    lacking = (1,) if ends == "is given up" else ()
    assert (decision.finished, decision.lacking) == (True, lacking)


V = [Version(1, n) for n in range(20)]


def joined(versions, name=""):
    fetching = Fetching(versions, name)
    while (fetch := fetching.next()) is not None:
        fetching.got(fetch.fragment, fetch.want)
    assert fetching.joined
    return fetching


def test_a_join_fetches_every_fragment_in_full_some_at_a_time():
    fetching = Fetching([V[3]] * (JOIN_FETCHES + 2))
    begun = [fetching.next() for _ in range(JOIN_FETCHES)]
    assert [(f.fragment, f.want, f.have) for f in begun] == [
        (fragment, V[3], None) for fragment in range(JOIN_FETCHES)
    ]
    assert fetching.next() is None
    fetching.got(1, V[3])
    assert fetching.next().fragment == JOIN_FETCHES
    fetching.want(1, V[4])
    for fragment in (0, 2, 3, JOIN_FETCHES):
        fetching.got(fragment, V[3])
    last = fetching.next()
    assert (last.fragment, last.have) == (JOIN_FETCHES + 1, None)
    assert fetching.next() is None, "what came meanwhile waits for the join"
    assert not fetching.joined
    fetching.got(last.fragment, V[3])
    assert fetching.joined
    assert fetching.next()[:3] == (1, V[4], V[3])


def test_what_failed_or_was_cut_off_comes_again():
    fetching = Fetching([V[3]] * 2)
    fetching.next()
    fetching.want(0, V[5])
    assert fetching.again(0)[:3] == (0, V[5], None)
    assert fetching.next().fragment == 1
    assert fetching.next() is None
    fetching = joined([V[3]])
    fetching.want(0, V[6])
    first = fetching.next()
    fetching.failed(0)
    assert fetching.next() == first
    fetching.disconnected()
    assert fetching.next() == first


def test_after_it_fetches_go_one_at_a_time_and_first_what_lags_most():
    fetching = joined([V[3], V[1], V[2]])
    for fragment in range(3):
        fetching.want(fragment, V[4])
    order = []
    while (fetch := fetching.next()) is not None:
        assert fetching.next() is None
        order.append(fetch.fragment)
        fetching.got(fetch.fragment, fetch.want)
    assert order == [1, 2, 0]


def test_older_versions_than_known_are_not_wanted():
    fetching = joined([V[3]])
    fetching.want(0, V[2])
    assert fetching.next() is None
    fetching.want(0, V[6])
    fetching.want(0, V[5])
    fetch = fetching.next()
    assert (fetch.want, fetch.have, fetch.accepted) == (V[6], V[3], V[3])


def test_a_chain_that_is_gone_is_fetched_in_full():
    fetching = joined([V[3]])
    fetching.want(0, V[6])
    fetching.gone(fetching.next().fragment)
    fetch = fetching.next()
    assert (fetch.have, fetch.accepted) == (None, V[3]), "all hosts have that one"
    fetching.got(0, V[6])
    assert fetching.next() is None


def test_what_is_gone_though_it_came_by_another_connection_is_fetched_in_full():
    fetching = joined([V[3]])
    fetching.want(0, V[6])
    fetching.next()
    fetching.disconnected()
    fetching.got(0, fetching.next().want)
    fetching.gone(0)  # So ends the one that was cut off.
    assert fetching.next()[:3] == (0, V[6], None)


def part(outcome="done", chain=None):
    return HostFetch(outcome=outcome, chain=chain)


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ([part(chain=2), part(chain=2)], "done"),
        ([part(), part()], "done"),
        ([part(chain=1)], "done"),
        ([], "done"),
        # Some got publishes and others the anchor, or more of them.
        ([part(chain=2), part()], "gone"),
        ([part(chain=2), part(chain=1)], "gone"),
        ([part(chain=2), part("gone"), part("lost")], "gone"),
        ([part("lost"), part(chain=2), part()], "lost"),
    ],
)
def test_hosts_adopt_together_or_fetch_again(parts, outcome):
    assert agreed(parts) == outcome
    assert agreed(parts[::-1]) == outcome


def sources(*names):
    donors = tuple(Donor(island=name, addresses=(f"{name}:1",)) for name in names)
    return Sources(donors=donors, within_s=1.0, stripes={"": "d"})


@pytest.mark.parametrize(("waited_s", "late"), [(0.5, False), (0.501, True)])
def test_a_donor_that_gives_a_publish_up_in_the_second_half_was_late(waited_s, late):
    assert gave_up_late(sources("a"), waited_s) == late


def asked(fetch):
    return [d.island for d in fetch.sources.donors] if fetch.sources else None


def test_a_donor_asks_those_before_it_and_gives_what_it_gets():
    said = sources("a", "b")
    for name, donors, gives in (
        ("a", None, True),
        ("b", ["a"], True),
        ("c", ["a", "b"], False),
    ):
        fetching = joined([V[3]], name)
        fetching.want(0, V[4], said)
        fetch = fetching.next()
        assert (asked(fetch), fetch.gives, fetch[:3]) == (
            donors,
            gives,
            (0, V[4], V[3]),
        )


def test_publishes_are_had_from_their_donors_one_by_one():
    fetching = joined([V[3]], "c")
    for version in (V[4], V[5], V[6]):
        fetching.want(0, version)  # As a verdict says, which may come first.
        fetching.want(0, version, sources("a"))
    for version in (V[4], V[5], V[6]):
        fetch = fetching.next()
        assert (fetch.want, asked(fetch)) == (version, ["a"])
        fetching.got(0, version)
    assert fetching.next() is None


def test_a_chain_of_which_the_first_has_no_donor_comes_from_the_coordinator():
    fetching = joined([V[3]], "c")
    fetching.want(0, V[4])
    fetching.want(0, V[5], sources("c"))
    fetch = fetching.next()
    assert (fetch.want, asked(fetch), fetch.gives) == (V[5], None, True)


def test_what_an_island_gives_it_gets_first():
    fetching = joined([V[3], V[2]], "c")
    fetching.want(1, V[3], sources("a"))
    fetching.want(0, V[4], sources("c"))
    assert fetching.next().fragment == 0


def test_a_donor_that_failed_rests():
    fetching = joined([V[3]], "c")
    fetching.rest("a", until=50.0)
    fetching.want(0, V[4], sources("a", "b"))
    assert asked(fetching.next(now=49.0)) == ["b"]
    fetching.failed(0)
    assert asked(fetching.next(now=50.0)) == ["a", "b"]


def test_sources_of_few_versions_are_kept():
    fetching = joined([V[0]], "c")
    for version in V[1:]:
        fetching.want(0, version, sources("a"))
    first = V[-1].number - MAX_CHAIN
    assert asked(fetching.next()) == (["a"] if first <= 0 else None)
    assert [*fetching._sources[0]] == V[-MAX_CHAIN:]


def test_the_coordinator_hears_once_of_a_donor_that_failed(told):
    told.donor_failed("a")
    told.donor_failed("a")
    assert told.failed_donors() == (DonorFailed(island="a"),)
    assert told.failed_donors() == ()
