"""Break the product on purpose, to show that every invariant of `faults/` can fail.

Each plant replaces one function by one that does less, or more, than it should, or a
share by another, while a schedule is played.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from msgspec.structs import replace

from diloco_jax.data.reader import LeasedPositions
from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.coordinator import (
    anchors,
    claims,
    decide,
    ending,
    fragments,
    leases,
    ledger,
    members,
    recovery,
    schedule,
    steering,
    takes,
)
from diloco_jax.protocol.coordinator.state import (
    Note,
    Persist,
    Tell,
    with_account,
    with_fragment,
)
from diloco_jax.protocol.holding import MergePrepared
from diloco_jax.protocol.island.boundary import Books
from diloco_jax.protocol.messages import Granted, Progress, Version
from diloco_jax.protocol.records import Left, Merged, Removed
from diloco_jax.simulation.coordinator import VirtualCoordinator
from diloco_jax.simulation.faults.disk import Disk

Broken = Callable[..., Any]
"""Is called in place of a function, with that function and then with its arguments."""


class Plant(NamedTuple):
    """`owner.name` is replaced by `broken`, which `invariant` must notice."""

    invariant: str
    owner: Any
    name: str
    broken: Broken


def _always(value: Any) -> Broken:
    return lambda original, *arguments, **options: value


def _argument(index: int) -> Broken:
    """Change nothing: give an argument back as it is."""
    return lambda original, *arguments, **options: arguments[index]


def _forgets_the_last_merge(
    recover: Any, config: Any, snapshot: Any, records: Any, now: float
) -> Any:
    merges = [i for i, r in enumerate(records) if isinstance(r, Merged)]
    kept = [r for i, r in enumerate(records) if i not in merges[-1:]]
    return recover(config, snapshot, kept, now)


def _reads_no_log(
    recover: Any, config: Any, snapshot: Any, records: Any, now: float
) -> Any:
    return recover(config, snapshot, (), now)


def _keeps_what_a_worker_had(
    recover: Any, config: Any, snapshot: Any, records: Any, now: float
) -> Any:
    after = recover(config, snapshot, records, now)
    for before in snapshot.fragments:
        fragment = after.fragments[before.index]
        for name, account in before.accounts.items():
            kept = replace(fragment.accounts[name], take=account.take)
            fragment = with_account(fragment, name, kept)
        after = with_fragment(after, fragment)
    return after


def _keeps_the_take(book: Any, before: Any, c: Any, merged: int) -> Any:
    after = book(before, c, merged)
    take = before.accounts[c.island].take
    account = replace(after.accounts[c.island], take=take)
    return replace(after, accounts={**after.accounts, c.island: account})


def _keeps_what_is_merged(
    adopt: Any, books: Any, fragment: int, version: Any, step: int
) -> Any:
    taken = books.must_wait(fragment)
    adoption = adopt(books, fragment, version, step)
    return "kept" if taken and adoption == "adopted" else adoption


def _loses_a_step(known: Any, turn: Any, f: Any, name: str, held: Any) -> Any:
    end = max(held.start, held.end - 1)
    return known(turn, f, name, replace(held, end=end))


def _changes_effects(change: Callable[[Any, Any], Any]) -> Broken:
    """Change each effect of a function, given what it was called with; None: it has
    none."""

    def broken(function: Any, turn: Any, *arguments: Any) -> Any:
        before = len(turn.effects)
        found = function(turn, *arguments)
        effects = [change(e, (turn, *arguments)) for e in turn.effects[before:]]
        turn.effects[before:] = [e for e in effects if e is not None]
        return found

    return broken


def _tapes_no(kind: str) -> Broken:
    def change(effect: Any, called: Any) -> Any:
        return None if called[2].kind == kind and isinstance(effect, Note) else effect

    return _changes_effects(change)


def _tells_what_it_counts_now(effect: Any, called: Any) -> Any:
    if not (isinstance(effect, Tell) and isinstance(effect.message, Progress)):
        return effect
    turn, *_ = called
    tokens = ledger.progress_tokens(turn.config, turn.state)
    return replace(effect, message=replace(effect.message, tokens=tokens))


def _lets_the_removed_stay(remove: Any, turn: Any, name: str) -> None:
    turn.state = members.with_admitted(turn.state, name, admitted=False)
    turn.persist(Removed(island=name))


def _draws_backwards(draw: Any, positions: Any, count: int) -> Any:
    drawn = draw(positions, count)
    return None if drawn is None else drawn[::-1]


def _needs_one_less(settle: Any, turn: Any, *arguments: Any, **options: Any) -> Any:
    config = turn.config
    turn.config = replace(config, quorum=max(1, config.quorum - 1))
    settled = settle(turn, *arguments, **options)
    turn.config = config
    return settled


def _refuses_nobody_as(code: str) -> Broken:
    def broken(refusal: Any, *arguments: Any) -> Any:
        refuse = refusal(*arguments)
        return None if refuse is not None and refuse.code == code else refuse

    return broken


def _hides_what_they_leave(effect: Any, called: Any) -> Any:
    if isinstance(effect, Persist) and isinstance(effect.record, Left):
        return replace(effect, record=replace(effect.record, left_behind=()))
    return effect


def _counts_twice(book: Any, before: Any, c: Any, merged: int) -> Any:
    return book(before, replace(c, tokens=2 * c.tokens), merged)


def _frees_all_data(release: Any, state: Any, name: str, kept: Any) -> Any:
    return release(state, name, ())


def _writes_last(step: Any, *arguments: Any) -> Any:
    state, effects = step(*arguments)
    return state, sorted(effects, key=lambda effect: isinstance(effect, Persist))


def _leaves_a_gap(effect: Any, called: Any) -> Any:
    if not (isinstance(effect, Tell) and isinstance(effect.message, Granted)):
        return effect
    message = replace(effect.message, offset=effect.message.offset + 1)
    return replace(effect, message=message)


def _allows_one_version_more(
    is_in_time: Any, config: Any, base: Any, current: Any
) -> Any:
    more = replace(config, max_staleness=config.max_staleness + 1)
    return is_in_time(more, base, current)


def _forgets_what_was_left_behind(
    pending: Any, state: Any, name: str, incarnation: int
) -> Any:
    fragments = tuple(replace(f, left_behind=()) for f in state.fragments)
    return pending(replace(state, fragments=fragments), name, incarnation)


def _frees_all_that_departed(free: Any, state: Any) -> Any:
    for ended in state.departed:
        state = leases._forget(state, ended)
    return state


def _begins_with_all_data(first_state: Any, *arguments: Any) -> Any:
    return replace(first_state(*arguments), next_position=0)


def _gives_all_steps_one_rate(stepped: Any, books: Any, rate: float) -> Any:
    return stepped(books, 1.0)


def _says_prepared(prepare: Any, coordinator: Any, merge: Any, prepared: Any) -> None:
    if not coordinator.dead:
        coordinator._written(merge, prepared)
        fragment, version = merge.fragment, merge.version
        coordinator.hear(
            MergePrepared(fragment=fragment, version=version, prepared=prepared)
        )


def _forgets_all(forget: Any, disk: Any, fragment: int, through: Any) -> None:
    forget(disk, fragment, disk.saved(fragment)[-1])


def _counts_what_was_prepared(restore: Any, disk: Any, committed: Any) -> Any:
    found = enumerate(committed)
    return restore(disk, [max([*disk.published(f), v]) for f, v in found])


def _finds_what_is_lost(restore: Any, disk: Any, committed: Any) -> Any:
    merging, _ = restore(disk, committed)
    return merging, set()


def _leaves_the_last_publish_out(restore: Any, disk: Any, committed: Any) -> Any:
    behind = [
        max([*disk.saved(f)[:1], Version(v.term, v.number - 1)])
        for f, v in enumerate(committed)
    ]
    return restore(disk, behind)


PLANTS = {
    "recovery_forgets_a_merge": Plant(
        "versions", recovery, "recover", _forgets_the_last_merge
    ),
    "recovery_reads_no_log": Plant("adopted", recovery, "recover", _reads_no_log),
    "a_publish_is_skipped": Plant("anchors", Arrival, "followed_by", _argument(1)),
    "a_cycle_is_kept_at_once": Plant("cycles", schedule, "is_at_cycle", _always(True)),
    "deltas_outlive_their_worker": Plant(
        "held", recovery, "recover", _keeps_what_a_worker_had
    ),
    "what_was_merged_above_an_anchor_stays_merged": Plant(
        "gathered", recovery, "_merged_above", _always({})
    ),
    "a_worker_that_is_back_gets_nothing": Plant(
        "liveness", takes, "ask_to_resend", _argument(1)
    ),
    "what_a_worker_lost_is_in_no_book": Plant(
        "ledger", ledger, "lose_missing", _argument(1)
    ),
    "ticks_are_used_again": Plant("ticks", schedule, "after_crash", _argument(1)),
    "a_new_term_takes_any_anchor": Plant(
        "versions", anchors, "_version", _always(Version())
    ),
    "an_old_coordinator_serves": Plant("recorded", members, "how_ahead", _always("")),
    "whoever_offers_an_anchor_is_believed": Plant(
        "liars", anchors, "_vote", _always("agrees")
    ),
    "a_new_term_grants_data_again": Plant(
        "data", recovery, "first_state", _begins_with_all_data
    ),
    "takes_stay_after_a_merge": Plant("merged_once", ledger, "book", _keeps_the_take),
    "merged_deltas_are_kept": Plant("kept", Books, "adopt", _keeps_what_is_merged),
    "a_step_is_left_out": Plant("deltas", takes, "known", _loses_a_step),
    "one_less_than_quorum": Plant("quorum", fragments, "close_if_due", _needs_one_less),
    "takes_are_not_on_the_tape": Plant(
        "recorded", decide, "_record", _tapes_no("took")
    ),
    "adoptions_are_not_on_the_tape": Plant(
        "recorded", decide, "_record", _tapes_no("adopted")
    ),
    "fenced_ones_come_in": Plant(
        "fenced", members, "entry_refusal", _refuses_nobody_as("fenced")
    ),
    "the_dead_merge_unsaid": Plant(
        "fenced", members, "end", _changes_effects(_hides_what_they_leave)
    ),
    "stale_deltas_are_merged": Plant(
        "stale", takes, "refuse_if_untimely", _argument(1)
    ),
    "one_more_version_is_no_delay": Plant(
        "stale", takes, "_is_in_time", _allows_one_version_more
    ),
    "data_of_deltas_left_behind_is_free": Plant(
        "data", leases, "_pending", _forgets_what_was_left_behind
    ),
    "data_of_departed_is_free_at_once": Plant(
        "data", leases, "free_departed", _frees_all_that_departed
    ),
    "two_processes_share_an_incarnation": Plant(
        "durable", members, "entry_refusal", _refuses_nobody_as("name_in_use")
    ),
    "long_deltas_are_merged": Plant("bounds", takes, "refuse_long", _argument(1)),
    "any_rates_are_believed": Plant(
        "bounds", schedule.Fleet, "highest_rate", _always(math.inf)
    ),
    "all_steps_have_one_rate": Plant(
        "honest", Books, "stepped", _gives_all_steps_one_rate
    ),
    "quarantined_deltas_are_merged": Plant(
        "quarantine", takes, "refuse_quarantined", _always(None)
    ),
    "whoever_comes_is_let_in": Plant("door", members, "unknown", _always("")),
    "who_was_removed_stays": Plant("door", steering, "_remove", _lets_the_removed_stay),
    "boasts_are_believed": Plant("speeds", claims, "_no_shorter", _argument(0)),
    "a_sleep_is_no_time": Plant("speeds", claims, "slept", _argument(0)),
    "tokens_count_twice": Plant("ledger", ledger, "book", _counts_twice),
    "progress_goes_back": Plant(
        "ledger", decide, "_report", _changes_effects(_tells_what_it_counts_now)
    ),
    "data_is_used_backwards": Plant("data", LeasedPositions, "draw", _draws_backwards),
    "merged_data_is_free": Plant("data", leases, "release", _frees_all_data),
    "data_of_lost_deltas_stays_away": Plant(
        "data", leases, "free_departed", _argument(0)
    ),
    "the_log_is_written_last": Plant("durable", decide, "step", _writes_last),
    "the_end_awaits_nobody": Plant(
        "last_steps", ending, "_more_may_come", _always(False)
    ),
    "the_end_is_slept_through": Plant("last_steps", ending, "awake", _always(None)),
    "the_end_waits_for_what_hangs": Plant(
        "last_steps", ending, "OPEN_BY", _always(1.0)
    ),
    "takes_are_asked_for_once": Plant(
        "liveness", members, "without_take", _argument(1)
    ),
    "a_full_disk_counts_as_written": Plant(
        "prepared", VirtualCoordinator, "_prepare", _says_prepared
    ),
    "publishes_go_with_the_newest_snapshot": Plant(
        "chains", Disk, "forget", _forgets_all
    ),
    "a_record_without_space_counts_as_written": Plant(
        "data", Disk, "has_space", _always(True)
    ),
    "a_prepared_merge_is_restored": Plant(
        "restored", Disk, "restore", _counts_what_was_prepared
    ),
    "an_empty_disk_counts_as_whole": Plant(
        "restored", Disk, "restore", _finds_what_is_lost
    ),
    "a_holder_serves_before_it_has_caught_up": Plant(
        "restored", Disk, "restore", _leaves_the_last_publish_out
    ),
    "grants_have_a_gap": Plant(
        "unbroken", leases, "_grant", _changes_effects(_leaves_a_gap)
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Break the code by this fault as long as the context lasts."""
    _, owner, of, broken = PLANTS[name]
    original = getattr(owner, of)

    def replaced(*arguments: Any, **options: Any) -> Any:
        return broken(original, *arguments, **options)

    value = replaced if callable(original) else broken(original)
    with mock.patch.object(owner, of, value):
        yield
