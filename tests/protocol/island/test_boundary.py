"""One order of things at a boundary, whatever stands behind it."""

import coordinator_says as says
import msgspec
import pytest

from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.island.boundary import (
    Adoption,
    Ahead,
    Books,
    Boundary,
    Decision,
    Ending,
    Goal,
    Watching,
)
from diloco_jax.protocol.island.conversation import Conversation
from diloco_jax.protocol.messages import Measures, Span, TakeRequest, Version, Watch


class Island:
    """Keeps what a boundary does, in order."""

    def __init__(self, rule="rebase", fragments=3):
        self.done, self.told = [], Conversation()
        self.watching = Watching(fragments, lambda f: self.done.append(("copy", f)))
        self.boundary = Boundary(
            Books([Version()] * fragments, ADOPT_RULES.find(rule)),
            Goal(total_tokens=1000, tokens_per_step=10, steps_per_cycle=6),
            arrays=self,
            incoming=self,
            outgoing=self,
            data=self,
            watching=self.watching,
        )

    def at(self, step, decision=None):
        """Acts; returns what was done."""
        self.done = []
        self.refused = self.boundary.act(decision or self.told.decide(), step)
        return self.done

    def take(self, fragment):
        return f"delta {fragment}"

    def put(self, fragment, tick, encoded):
        assert encoded == f"delta {fragment}"
        self.done.append(("take", fragment, tick))

    def forget(self, fragment, tick):
        self.done.append(("forget", fragment, tick))

    def pick(self, fragment, version):
        return fragment, version

    def adopt(self, arrival, *, keep):
        self.done.append(("adopt", *arrival, keep))

    def judge(self, fragment, outcome):
        self.done.append((outcome, fragment))

    def grant(self, span):
        self.done.append(("grant", span))


V1 = Version(1, 1)


@pytest.mark.parametrize(
    ("rule", "order"),
    [
        ("rebase", ["adopt", "take"]),
        ("keep", ["adopt", "take"]),
        ("overwrite", ["take", "adopt"]),
        ("blend", ["take", "adopt"]),
    ],
)
def test_the_adopt_rule_says_what_comes_first(rule, order):
    island = Island(rule)
    says.take(island.told, 0, 1)
    island.told.arrived(0, V1, 1)
    assert [what for what, *_ in island.at(4)] == order


def test_a_verdict_comes_before_the_version_it_came_with():
    island = Island()
    says.take(island.told, 0, 1)
    island.at(4)
    island.told.arrived(0, V1, 1)
    says.judge(island.told, 0, 1, "refused", "empty", V1)
    says.grant(island.told, Span(0, 8))
    assert island.at(5) == [
        ("grant", Span(0, 8)),
        ("forget", 0, 1),
        ("reopened", 0),
        ("adopt", 0, V1, False),
    ]
    ((fragment, tick, reason, outcome),) = island.refused
    assert (fragment, tick, reason, outcome) == (0, 1, "empty", "reopened")


def test_a_boundary_without_news_notes_nothing():
    island = Island()
    assert island.at(0) == []
    assert island.boundary.books.drain() == ()


def test_a_new_term_drops_the_takes_of_the_term_before():
    island = Island()
    says.take(island.told, 0, 1)
    island.at(4)
    assert island.at(5, Decision(term=2)) == [("forget", 0, 1), ("dropped", 0)]
    assert island.boundary.books.outstanding() == ()


def test_a_version_that_is_not_newer_is_left_out():
    island = Island()
    adoption = Decision(adoptions=(Adoption(0, V1),))
    assert island.at(1, adoption) == [("adopt", 0, V1, False)]
    assert island.at(2, adoption) == []


# ---- takes that are put off -------------------------------------------------------


def test_a_take_that_is_put_off_comes_as_many_steps_later():
    island = Island()
    says.take(island.told, 1, 5, after=2)
    assert island.at(3) == []
    says.take(island.told, 1, 5, after=2)  # Asked again: it is on its way.
    assert island.at(3) == []
    says.take(island.told, 0, 6)
    assert island.at(4) == [("take", 0, 6)]
    assert island.at(5) == [("take", 1, 5)]
    assert island.at(6) == []


@pytest.mark.parametrize(
    ("first", "second", "due"), [(5, 1, 5), (5, 0, 4), (1, 5, 4), (0, 0, 3)]
)
def test_a_take_that_is_asked_for_again_comes_earlier_and_never_later(
    first, second, due
):
    """Asked for at step 3, and again at step 4."""
    island = Island()
    says.take(island.told, 1, 5, after=first)
    came = island.at(3)
    says.take(island.told, 1, 5, after=second)
    steps = [3] if came else [s for s in range(4, 12) if island.at(s)]
    assert steps == [due]


@pytest.mark.parametrize("after", [6, 7, 2**16, 2**48])
def test_a_take_is_put_off_by_a_cycle_at_most(after):
    island = Island()
    says.take(island.told, 1, 5, after=after)
    assert [s for s in range(3, 30) if island.at(s)] == [3 + 6]


def test_a_take_that_is_put_off_comes_at_once_when_no_steps_follow():
    island = Island()
    says.take(island.told, 1, 5, after=2)
    assert island.at(3) == []
    says.progress(island.told, 970)
    assert island.at(3) == [("take", 1, 5)]


def test_takes_that_are_put_off_end_with_their_term():
    island = Island()
    says.welcome(island.told, 1)
    says.take(island.told, 1, 5, after=2)
    assert island.at(3) == []
    says.welcome(island.told, 2)
    assert island.at(9) == []


def test_a_take_waits_for_the_adoption_of_the_merged_one_however_it_is_put_off():
    island = Island()
    says.take(island.told, 0, 1)
    island.at(1)
    says.judge(island.told, 0, 1)
    says.take(island.told, 0, 2, after=1)
    island.at(2)
    assert island.at(3) == []
    says.take(island.told, 0, 3)
    assert island.at(4) == [], "the newer one takes its place"
    island.told.arrived(0, V1, 1)
    assert island.at(5) == [("adopt", 0, V1, False), ("take", 0, 3)]


# ---- the end of steps ---------------------------------------------------------------


def test_it_steps_until_the_run_has_its_tokens_by_its_own_count():
    island = Island()
    assert island.boundary.may_step(99)
    assert not island.boundary.may_step(100)
    says.progress(island.told, 500)
    island.at(49)
    assert island.boundary.may_step(49)
    assert not island.boundary.may_step(50)
    assert island.boundary.status(50, Measures()).phase == "stopped"


def test_it_steps_until_it_is_told_to_stop():
    island = Island()
    says.stop(island.told)
    island.at(4)
    assert not island.boundary.may_step(4)
    says.welcome(island.told, 1)
    says.welcome(island.told, 2)
    island.at(4)
    assert island.boundary.may_step(4), "the new term says so itself"
    island.told.leave()
    island.at(4)
    assert not island.boundary.may_step(4)


# ---- several hosts ------------------------------------------------------------------


def test_decisions_take_effect_so_many_boundaries_later():
    ahead = Ahead(2)
    asked = Decision(takes=(TakeRequest(fragment=0, tick=1),))
    assert ahead.next(asked) == Decision()
    assert ahead.pending
    assert ahead.next(Decision()) == Decision()
    assert ahead.next(Decision()) == asked
    assert not ahead.pending


def test_all_hosts_are_told_the_same_decision():
    told = Conversation()
    says.take(told, 0, 1, after=2)
    says.judge(told, 0, 1, "refused", "stale")
    says.grant(told, Span(0, 8))
    told.arrived(0, V1, 1)
    told.end(Ending(3, "another run", "refused"))
    decision = told.decide()
    sent = msgspec.msgpack.encode(decision)
    assert msgspec.msgpack.decode(sent, type=Decision) == decision


def test_what_is_so_already_is_not_waited_for():
    ahead = Ahead(1)
    ahead.next(Decision(stop=True))
    assert ahead.pending
    ahead.next(Decision(stop=True))
    assert not ahead.pending


def watch(told, cycle, fragment, number):
    version = Version(1, number)
    told.receive(Watch(cycle=cycle, fragment=fragment, version=version))


@pytest.mark.parametrize("brings", [False, True])
def test_an_anchor_is_copied_once_beside_the_adoption_of_the_next_or_of_itself(brings):
    island = Island(fragments=2)
    watch(island.told, 1, 0, int(brings))
    island.told.arrived(0, V1, 1)
    done = [("copy", 0), ("adopt", 0, V1, False)]
    assert island.at(4) == (done[::-1] if brings else done)
    assert island.at(5) == []


def test_a_complete_cycle_is_evaluated_before_another_is_copied():
    island = Island(fragments=2)
    for fragment in range(2):
        assert not island.watching.evaluates
        watch(island.told, 3, fragment, 0)
        island.at(4)
    assert island.watching.evaluates
    assert not island.boundary.status(4, Measures()).watches
    watch(island.told, 6, 0, 0)
    assert island.at(5) == [], "the copies are in use"
    assert island.watching.cycle == 3
    island.watching.evaluated()
    assert island.boundary.status(5, Measures()).watches
    watch(island.told, 9, 0, 0)
    assert island.at(6) == [("copy", 0)]
    assert island.watching.cycle == 9


def test_a_cycle_of_which_a_version_was_missed_is_left_for_the_next_one():
    island = Island(fragments=2)
    island.told.arrived(0, Version(1, 2), 2)
    island.at(3)
    watch(island.told, 1, 0, 1)
    watch(island.told, 1, 1, 0)
    assert island.at(4) == [("copy", 1)], "fragment 0 is beyond it"
    assert not island.watching.evaluates
    watch(island.told, 2, 0, 2)
    watch(island.told, 2, 1, 0)
    assert island.at(5) == [("copy", 0), ("copy", 1)]
    assert (island.watching.evaluates, island.watching.cycle) == (True, 2)


def test_tokens_of_others_are_on_the_record_once():
    island = Island()
    decision = msgspec.structs.replace(island.told.decide(), others_tokens=40)
    island.at(3, decision)
    (record,) = island.boundary.books.drain()
    assert (record.kind, record.value, record.step) == ("progress", 40, 3)
    island.at(4, decision)
    assert island.boundary.books.drain() == ()
