import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.protocol.island.boundary import Books
from diloco_jax.protocol.messages import Span, Version

V = [Version(1, n) for n in range(100)]


def books_of(versions, rule):
    return Books(versions, ADOPT_RULES.find(rule))


def take(tick, step, start=None):
    """(name of the call, its arguments, what it returns); None: anything."""
    return "take", (0, tick, step), start


def told(tick, verdict, step, outcome, newest=None, reason=""):
    more = () if newest is None else (V[newest],)
    return "judge", (0, tick, verdict, reason, step, *more), outcome


def stale(tick, step, outcome, newest=None):
    return told(tick, "refused", step, outcome, newest, "stale")


def adopt(number, step, outcome):
    return "adopt", (0, V[number], step), outcome


def waits(truth):
    return "must_wait", (0,), truth


PENDING = told(1, "pending", 5, "none", 1)
"""The version to come does not have the take."""
SCENES = {
    "takes follow each other without gap": (
        "rebase",
        [take(1, 4, 0), told(1, "merged", 5, "settled"), adopt(1, 6, "adopted")],
        [take(2, 9, 4)],
    ),
    "a take waits for the adoption of the merged one": (
        "rebase",
        [take(1, 4), waits(False), told(1, "merged", 5, "settled"), waits(True)],
        [adopt(1, 6, "adopted"), waits(False)],
    ),
    "a version that a pending delta is not in is adopted beside it": (
        "keep",
        [take(1, 4), PENDING, adopt(1, 6, "kept"), told(1, "merged", 7, "settled", 2)],
        # It would count the first four steps again.
        [waits(True), adopt(2, 8, "adopted"), take(2, 9, 4)],
    ),
    "verdicts may be ahead of the versions they came with": (
        "keep",
        [take(1, 4), PENDING, told(1, "merged", 5, "settled", 2)],
        [adopt(1, 6, "kept"), waits(True), adopt(2, 7, "adopted")],
    ),
    "a version that may have the delta takes its place": (
        "keep",
        [take(1, 4), PENDING, adopt(2, 6, "adopted")],
        [told(1, "merged", 7, "settled", 2), waits(False)],
    ),
    "what is known of a take before it is made counts": (
        "keep",
        [PENDING, take(1, 6)],
        [adopt(1, 6, "kept")],
    ),
    "a kept delta that is stale leaves with the next version": (
        "keep",
        [take(1, 4), PENDING, adopt(1, 6, "kept"), stale(1, 7, "dropped", 2)],
        # It is in the local value still; open again, it would grow.
        [waits(True), adopt(2, 8, "adopted"), take(2, 9, 4)],
    ),
    "a stale delta leaves with a version that was to be kept beside it": (
        "keep",
        [PENDING, take(1, 6), adopt(1, 6, "kept"), told(1, "pending", 7, "none", 2)],
        [stale(1, 7, "dropped", 2), adopt(2, 8, "adopted"), waits(False)],
    ),
    "a kept delta without steps keeps nobody waiting": (
        "keep",
        [told(1, "pending", 0, "none", 1), take(1, 0), adopt(1, 0, "kept")],
        [told(1, "refused", 0, "reopened", 1, "empty"), waits(False)],
    ),
    "what was known of one take is not of the next": (
        "keep",
        [take(1, 4), PENDING, stale(1, 5, "reopened", 1), adopt(1, 6, "adopted")],
        [take(2, 8), told(1, "pending", 8, "none", 2), adopt(2, 9, "adopted")],
    ),
    "that one take was kept says nothing of the next": (
        "keep",
        [take(1, 4), PENDING, adopt(1, 6, "kept"), stale(1, 7, "reopened", 1)],
        [take(2, 8), stale(2, 9, "reopened", 2)],
    ),
    **{
        f"{rule} takes a pending delta out": (
            rule,
            [take(1, 4), PENDING],
            [adopt(1, 6, "adopted")],
        )
        for rule in ("rebase", "overwrite", "blend")
    },
    "a refusal before an adoption opens the steps again": (
        "rebase",
        [take(1, 4), stale(1, 6, "reopened")],
        [waits(False), take(2, 8, 0)],  # No newer version is known.
    ),
    "after a stale take the next one waits for the newer version": (
        "rebase",
        [take(1, 4), stale(1, 6, "reopened", 2), waits(True), adopt(2, 8, "adopted")],
        [waits(False), take(2, 8, 0)],
    ),
    "a refusal after an adoption loses the steps": (
        "rebase",
        [take(1, 4), adopt(1, 5, "adopted"), stale(1, 6, "dropped")],
        [take(2, 8, 4)],
    ),
    "a take without steps waits for no newer version": (
        "rebase",
        [take(1, 0), told(1, "refused", 0, "reopened", 2, "empty")],
        [waits(False)],
    ),
    "overwrite loses the steps since the take": (
        "overwrite",
        [take(1, 4), told(1, "merged", 6, "settled"), adopt(1, 6, "adopted")],
        [take(2, 8, 6)],
    ),
    "what overlaps is not opened again with the same start": (
        "rebase",
        [take(1, 4), told(1, "refused", 6, "reset", reason="overlap"), take(2, 8, 6)],
        [
            adopt(1, 9, "adopted"),
            told(2, "refused", 9, "dropped", reason="overlap"),
            take(3, 10, 8),
        ],
    ),
    **{
        f"{reason} starts again from the anchor": (
            "rebase",
            [take(1, 4), told(1, "refused", 6, "reset", reason=reason)],
            [take(2, 8, 6)],
        )
        for reason in ("non_finite", "out_of_bounds", "quarantined", "future")
    },
}


@pytest.mark.parametrize(("rule", "first", "then"), SCENES.values(), ids=SCENES)
def test_a_scene_of_one_fragment(rule, first, then):
    books = books_of([V[0]], rule)
    for name, arguments, expected in [*first, *then]:
        found = getattr(books, name)(*arguments)
        if name == "take":
            assert found.base == books.version(0)
            found = found.start if expected is not None else None
        assert found == expected, (name, arguments)


def test_repeated_tick_and_outstanding_take_are_ignored():
    books = books_of([V[0]], "rebase")
    assert books.take(0, 1, 4) is not None
    assert books.take(0, 2, 5) is None
    assert books.judge(0, 1, "pending", "", 5) == "none"
    assert [(t.fragment, t.tick) for t in books.outstanding()] == [(0, 1)]
    books.judge(0, 1, "merged", "", 5)
    books.adopt(0, V[1], 5)
    assert books.take(0, 1, 6) is None
    assert [r.kind for r in books.drain()] == ["took", "adopted"]


def test_the_tape_says_what_became_of_a_delta():
    books = books_of([V[0]], "keep")
    for reason, kind in (("stale", "reopened"), ("non_finite", "reset")):
        assert books.take(0, 1 if kind == "reopened" else 2, 4) is not None
        tick = books.outstanding()[0].tick
        assert books.judge(0, tick, "refused", reason, 6) == kind
        assert [r.kind for r in books.drain()] == ["took", kind]
    books.take(0, 3, 8)
    books.judge(0, 3, "pending", "", 8, V[1])
    books.adopt(0, V[1], 8)
    books.judge(0, 3, "merged", "", 9, V[2])
    books.adopt(0, V[2], 9)
    adoptions = [r.tick for r in books.drain() if r.kind == "adopted"]
    assert adoptions == [3, -1], "which delta was kept"


def test_an_incarnation_says_what_it_begins_with():
    books = books_of([V[3], V[1]], "rebase")
    books.begin()
    begins = [(r.kind, r.step, r.fragment, r.version) for r in books.drain()]
    assert begins == [("adopted", 0, 0, V[3]), ("adopted", 0, 1, V[1])]
    assert books.adopt(0, V[4], 0) == "adopted"
    books.drain()
    books.restored(2, 40, [1], [{"seq": 7}])
    begins = books.drain()
    assert {(r.kind, r.step, r.start, r.value) for r in begins} == {
        ("restored", 0, 2, 40)
    }
    assert [(r.seq, r.fragment, r.unheard) for r in begins] == [
        (4, -1, UNSET),
        (5, 1, UNSET),
        (6, -1, {"seq": 7}),
    ]


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
            books.judge(fragment, taken, verdict, reason, step, newest)
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
    books.judge(0, 1, "pending", "", 5, V[1])
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
    assert books.judge(0, 1, "refused", "stale", 9) == "none", "an old verdict"
    assert books.must_wait(0), "its local values hold the dropped steps"
    assert books.take(1, 8, 10).start == 6
    assert books.adopt(0, Version(2, 3), 11) == "adopted"
    assert books.take(0, 7, 12).start == 4
