import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.island.books import Books
from diloco_jax.protocol.values import Span, Version

V = [Version(1, n) for n in range(100)]


def books_of(versions, rule):
    return Books(versions, ADOPT_RULES.find(rule))


def test_takes_follow_each_other_without_gap():
    books = books_of([V[0]], "rebase")
    assert books.take(0, 1, 4).start == 0
    assert books.settle(0, 1, "merged", "", 5) == "settled"
    assert books.adopt(0, V[1], 6) == "adopted"
    take = books.take(0, 2, 9)
    assert (take.start, take.end, take.base) == (4, 9, V[1])


def test_repeated_tick_and_outstanding_take_are_ignored():
    books = books_of([V[0]], "rebase")
    assert books.take(0, 1, 4) is not None
    assert books.take(0, 2, 5) is None
    books.settle(0, 1, "merged", "", 5)
    books.adopt(0, V[1], 5)
    assert books.take(0, 1, 6) is None
    assert [r.kind for r in books.drain()] == ["took", "adopted"]


def test_take_waits_for_the_adoption_of_the_merged_one():
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 4)
    assert not books.must_wait(0)
    books.settle(0, 1, "merged", "", 5)
    assert books.must_wait(0)
    books.adopt(0, V[1], 6)
    assert not books.must_wait(0)


def test_pending_take_stays_outstanding():
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 4)
    assert books.settle(0, 1, "pending", "", 5) == "none"
    assert [(t.fragment, t.tick) for t in books.outstanding()] == [(0, 1)]


def test_a_version_that_a_pending_delta_is_not_in_is_adopted_beside_it():
    books = books_of([V[0]], "keep")
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    assert books.adopt(0, V[1], 6) == "kept"
    assert books.settle(0, 1, "merged", "", 7, V[2]) == "settled"
    assert books.must_wait(0), "it would count the first four steps again"
    assert books.adopt(0, V[2], 8) == "adopted"
    assert books.take(0, 2, 9).start == 4
    adoptions = [r.tick for r in books.drain() if r.kind == "adopted"]
    assert adoptions == [1, -1], "the tape says which delta was kept"


def test_verdicts_may_be_ahead_of_the_versions_they_came_with():
    """Both versions were merged before the island had the first one."""
    books = books_of([V[0]], "keep")
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    books.settle(0, 1, "merged", "", 5, V[2])
    assert books.adopt(0, V[1], 6) == "kept"
    assert books.must_wait(0)
    assert books.adopt(0, V[2], 7) == "adopted"


def test_a_version_that_may_have_the_delta_takes_its_place():
    books = books_of([V[0]], "keep")
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    assert books.adopt(0, V[2], 6) == "adopted"
    books.settle(0, 1, "merged", "", 7, V[2])
    assert not books.must_wait(0)


def test_what_is_known_of_a_take_before_it_is_made_counts():
    """It was asked for, and the merge did not wait."""
    books = books_of([V[0]], "keep")
    books.settle(0, 1, "pending", "", 3, V[1])
    books.take(0, 1, 4)
    assert books.adopt(0, V[1], 6) == "kept"


def test_a_kept_delta_that_is_stale_leaves_with_the_next_version():
    """Open again, it would grow for as long as the island is late."""
    books = books_of([V[0]], "keep")
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    books.adopt(0, V[1], 6)
    assert books.settle(0, 1, "refused", "stale", 7, V[2]) == "dropped"
    assert books.must_wait(0), "it is in the local value still"
    assert books.adopt(0, V[2], 8) == "adopted"
    assert books.take(0, 2, 9).start == 4


def test_a_stale_delta_leaves_with_a_version_that_was_to_be_kept_beside_it():
    """At the end of a run no later one came: the island took nothing any more."""
    books = books_of([V[0]], "keep")
    books.settle(0, 1, "pending", "", 3, V[1])
    books.take(0, 1, 4)
    books.adopt(0, V[1], 5)
    books.settle(0, 1, "pending", "", 6, V[2])
    assert books.settle(0, 1, "refused", "stale", 6, V[2]) == "dropped"
    assert books.adopt(0, V[2], 7) == "adopted"
    assert not books.must_wait(0)
    assert books.take(0, 2, 8).start == 4


def test_a_kept_delta_without_steps_keeps_nobody_waiting():
    books = books_of([V[0]], "keep")
    books.settle(0, 1, "pending", "", 0, V[1])
    books.take(0, 1, 0)
    assert books.adopt(0, V[1], 0) == "kept"
    assert books.settle(0, 1, "refused", "empty", 0, V[1]) == "reopened"
    assert not books.must_wait(0)


def test_what_was_known_of_one_take_is_not_of_the_next():
    books = books_of([V[0]], "keep")
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    assert books.settle(0, 1, "refused", "stale", 5, V[1]) == "reopened"
    books.adopt(0, V[1], 6)
    books.take(0, 2, 8)
    books.settle(0, 1, "pending", "", 8, V[2])
    assert books.adopt(0, V[2], 9) == "adopted"


def test_that_one_take_was_kept_says_nothing_of_the_next():
    books = books_of([V[0]], "keep")
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    assert books.adopt(0, V[1], 6) == "kept"
    assert books.settle(0, 1, "refused", "stale", 7, V[1]) == "reopened"
    books.take(0, 2, 8)
    assert books.settle(0, 2, "refused", "stale", 9, V[2]) == "reopened"


@pytest.mark.parametrize("rule", ["rebase", "overwrite", "blend"])
def test_other_rules_take_a_pending_delta_out(rule):
    books = books_of([V[0]], rule)
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    assert books.adopt(0, V[1], 6) == "adopted"


def test_refusal_before_an_adoption_opens_the_steps_again():
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 4)
    assert books.settle(0, 1, "refused", "stale", 6) == "reopened"
    assert not books.must_wait(0), "no newer version is known"
    assert books.take(0, 2, 8).start == 0
    assert [r.kind for r in books.drain()] == ["took", "reopened", "took"]


def test_after_a_stale_take_the_next_one_waits_for_the_newer_version():
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 4)
    assert books.settle(0, 1, "refused", "stale", 6, V[2]) == "reopened"
    assert books.must_wait(0)
    books.adopt(0, V[2], 8)
    assert not books.must_wait(0)
    take = books.take(0, 2, 8)
    assert (take.start, take.end, take.base) == (0, 8, V[2])


def test_refusal_after_an_adoption_loses_the_steps():
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 4)
    books.adopt(0, V[1], 5)
    assert books.settle(0, 1, "refused", "stale", 6) == "dropped"
    assert books.take(0, 2, 8).start == 4


def test_a_take_without_steps_waits_for_no_newer_version():
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 0)
    assert books.settle(0, 1, "refused", "empty", 0, V[2]) == "reopened"
    assert not books.must_wait(0)


@pytest.mark.parametrize(
    "reason", ["non_finite", "out_of_bounds", "quarantined", "future"]
)
def test_an_unfit_delta_starts_again_from_the_anchor(reason):
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 4)
    assert books.settle(0, 1, "refused", reason, 6) == "reset"
    assert books.take(0, 2, 8).start == 6
    assert [r.kind for r in books.drain()] == ["took", "reset", "took"]


def test_what_overlaps_is_not_opened_again_with_the_same_start():
    books = books_of([V[0]], "rebase")
    books.take(0, 1, 4)
    assert books.settle(0, 1, "refused", "overlap", 6) == "reset"
    assert books.take(0, 2, 8).start == 6
    books.adopt(0, V[1], 9)
    assert books.settle(0, 2, "refused", "overlap", 9) == "dropped"
    assert books.take(0, 3, 10).start == 8


def test_an_incarnation_says_what_it_begins_with():
    books = books_of([V[3], V[1]], "rebase")
    books.begin()
    begins = [(r.kind, r.step, r.fragment, r.version) for r in books.drain()]
    assert begins == [("adopted", 0, 0, V[3]), ("adopted", 0, 1, V[1])]
    assert books.adopt(0, V[4], 0) == "adopted"


def test_overwrite_loses_the_steps_since_the_take():
    books = books_of([V[0]], "overwrite")
    books.take(0, 1, 4)
    books.settle(0, 1, "merged", "", 6)
    books.adopt(0, V[1], 6)
    assert books.take(0, 2, 8).start == 6


def test_old_versions_are_not_adopted():
    books = books_of([V[3]], "rebase")
    assert books.adopt(0, V[3], 1) == "none"
    assert books.adopt(0, V[2], 1) == "none"
    assert books.adopt(0, Version(2, 0), 1) == "adopted"
    assert books.version(0) == Version(2, 0)


def test_records_are_numbered_from_one_and_drained_once():
    books = books_of([V[0]], "rebase")
    books.granted(Span(8, 16), 0)
    books.progress(1000, 2)
    first = books.drain()
    assert [(r.seq, r.kind) for r in first] == [(1, "granted"), (2, "progress")]
    assert (first[0].start, first[0].stop, first[1].value) == (8, 16, 1000)
    assert books.drain() == ()


ACTION = st.tuples(
    st.sampled_from(
        ["step", "step", "take", "adopt", "merged", "pending", "refused", "non_finite"]
    ),
    st.integers(0, 1),
    st.integers(0, 2),
)


@settings(max_examples=300)
@given(
    rule=st.sampled_from(["keep", "rebase", "overwrite", "blend"]),
    script=st.lists(ACTION, min_size=20, max_size=60),
)
def test_intervals_tile_the_steps(rule, script):
    """Follows only the records, as the coordinator does: each step is merged, lost,
    outstanding or open, once. A take has the learning rates of its steps."""
    books = books_of([V[0], V[0]], rule)
    step, tick, versions = 0, 0, [0, 0]
    settled = [0, 0]  # [0, settled) is merged or lost, by the ledger's rules.
    outstanding = [None, None]
    resets = set()  # Fragments whose open steps went with their values.
    for action, fragment, ahead in script:
        refusal = ("refused", "stale") if action == "refused" else None
        if action == "step":
            step += 1
            books.stepped(1 / step)
        elif action == "take" and not books.must_wait(fragment):
            tick += 1
            books.take(fragment, tick, step)
        elif action == "adopt":
            versions[fragment] += 1
            books.adopt(fragment, V[versions[fragment]], step)
        elif outstanding[fragment] is not None:
            if action == "non_finite":
                refusal = ("refused", "non_finite")
                resets.add(fragment)
            taken = outstanding[fragment].tick
            verdict, reason = refusal or (action, "")
            newest = V[versions[fragment] + ahead]
            books.settle(fragment, taken, verdict, reason, step, newest)
            if verdict == "merged":
                settled[fragment] = outstanding[fragment].step
                outstanding[fragment] = None
        for record in books.drain():
            f = record.fragment
            if record.kind == "took":
                assert outstanding[f] is None
                assert settled[f] <= record.start <= record.step == step
                rates = [1 / (n + 1) for n in range(record.start, step)]
                assert record.rate_sum == pytest.approx(sum(rates))
                if rule != "overwrite" and f not in resets:
                    assert record.start == settled[f]
                resets.discard(f)
                settled[f] = record.start
                outstanding[f] = record
            elif record.kind in ("dropped", "reset"):
                settled[f] = outstanding[f].step
                outstanding[f] = None
            elif record.kind == "reopened":
                assert outstanding[f].start == settled[f]
                outstanding[f] = None
        assert {(t.tick, t.rate_sum) for t in books.outstanding()} == {
            (r.tick, r.rate_sum) for r in outstanding if r is not None
        }


def test_a_delta_that_a_new_term_dropped_is_kept_beside_no_version():
    books = books_of([V[0]], "keep")
    books.take(0, 1, 4)
    books.settle(0, 1, "pending", "", 5, V[1])
    books.new_term(6)
    assert books.adopt(0, V[1], 7) == "adopted"


def test_a_new_term_drops_takes_for_good_and_says_what_is_for_its_books():
    books = books_of([V[3], V[4], V[5]], "rebase")
    books.take(0, 1, 4)
    books.take(1, 2, 6)
    books.adopt(1, V[5], 7)
    books.drain()
    dropped = books.new_term(9)
    assert [(t.fragment, t.tick, t.start, t.end) for t in dropped] == [
        (0, 1, 0, 4),
        (1, 2, 0, 6),
    ]
    assert books.outstanding() == ()
    assert [(r.kind, r.fragment, r.start, r.tick) for r in books.drain()] == [
        ("dropped", 0, 0, 1),
        ("carried", 0, 4, -1),
        ("dropped", 1, 0, 2),
        ("carried", 1, 6, -1),
        ("carried", 2, 0, -1),
    ]
    assert books.settle(0, 1, "refused", "stale", 9) == "none", "an old verdict"
    assert books.must_wait(0), "its local values hold the dropped steps"
    assert books.take(1, 8, 10).start == 6
    assert books.adopt(0, Version(2, 3), 11) == "adopted"
    assert books.take(0, 7, 12).start == 4
