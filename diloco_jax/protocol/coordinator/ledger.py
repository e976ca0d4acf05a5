"""The ledger: which steps of which island entered which merge, and which are lost.

Per fragment, an incarnation's steps are settled in order: `[0, start)` is merged or
lost, `[start, steps)` is open. So merged + lost + open = computed, always and exactly.
Steps that an incarnation made in an earlier term, whose books are gone, are *carried*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import (
    MERGES_KNOWN,
    Account,
    Fragment,
    MergedTokens,
    PolicyConfig,
    State,
    booked,
    with_account,
)
from diloco_jax.protocol.messages import (
    Contribution,
    EndReason,
    LossReason,
    Span,
    Told,
    Version,
    join_spans,
)


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, weighted by the fragments' parameters and floored; they balance:
    computed = merged + sum(lost) + carried + in_flight. Merges of all fragments that an
    island was in, and while it was alive."""

    computed: int
    merged: int
    lost: dict[str, int]
    carried: int
    merges_in: int
    merges_alive: int

    @property
    def in_flight(self) -> int:
        """Tokens of which nothing is decided yet, with what flooring left."""
        return self.computed - self.merged - self.carried - sum(self.lost.values())


def merge(
    fragment: Fragment, merged: Sequence[Contribution], version: Version
) -> Fragment:
    """Return the fragment at the version into which these deltas are merged; recovery
    applies it too."""
    before = merged_into(fragment)
    for contribution in merged:
        fragment = book(fragment, contribution, before)
    return replace(
        fragment,
        version=version,
        newest=newest(fragment, version, merged),
        merging=(),
        merges=fragment.merges + 1,
    )


def book(fragment: Fragment, contribution: Contribution, merged: int) -> Fragment:
    """Book one delta as merged. If its incarnation has ended and another has begun,
    the delta does not count as participation of the new one.

    merged: tokens of the fragment's version, which the merge leads on from.
    """
    c, account = contribution, fragment.accounts[contribution.island]
    if account.incarnation == c.incarnation:
        # Booked already, but for a record that is read again after a crash.
        account = account.lose(c.start - account.start, "overwritten")
        account = replace(
            account,
            merges_in=account.merges_in + 1,
            merges_alive=account.merges_alive + 1,
            missed_merges=0,
            start=max(account.start, c.end),
            take=None,
            told=Told(tick=c.tick, verdict="merged", reason=""),
            last=c,
            base_tokens=tokens_at(fragment, c.base, merged),
        )
    account = replace(account, merged_tokens=account.merged_tokens + c.tokens)
    return with_account(fragment, c.island, account)


def newest(
    fragment: Fragment, version: Version, merged: Iterable[Contribution]
) -> tuple[MergedTokens, ...]:
    """Return `Fragment.newest` once these deltas are merged into this version."""
    by_island: dict[str, int] = {}
    for c in merged:
        by_island[c.island] = by_island.get(c.island, 0) + c.tokens
    last = MergedTokens(version=version, by_island=by_island)
    return (*fragment.newest, last)[-MERGES_KNOWN:]


def tokens_at(fragment: Fragment, version: Version, merged: int) -> int:
    """Return the tokens of a version that is at most `MERGES_KNOWN` merges old.

    merged: those of the fragment's version.
    """
    later = (m for m in fragment.newest if m.version > version)
    return merged - sum(sum(m.by_island.values()) for m in later)


def settled_steps(fragment: Fragment, island: Island) -> int:
    """Return the steps of the current incarnation that are settled, in the merge under
    way, or left behind for the next merge."""
    account = fragment.accounts[island.name]
    deltas = (*fragment.merging, *fragment.left_behind)
    own = (island.name, account.incarnation)
    ends = [c.end for c in deltas if (c.island, c.incarnation) == own]
    return max([account.start, *ends])


def close_account(
    fragment: Fragment, island: Island, reason: EndReason, settled_steps: int
) -> Fragment:
    """Book the steps of an ended incarnation from `settled_steps` on as lost."""
    if fragment.accounts[island.name].carrying:
        fragment = carry(fragment, island.name, island.steps)
        settled_steps = island.steps
    account = fragment.accounts[island.name]
    account = account.lose(max(island.steps - settled_steps, 0), reason)
    fragment = with_account(fragment, island.name, account)
    start = max(island.steps, settled_steps)
    return booked(fragment, island.name, start=start, take=None, told=None)


def carry(fragment: Fragment, name: str, steps: int) -> Fragment:
    """Book the incarnation's first `steps` steps as carried: they are in the books of
    an earlier term."""
    account = fragment.accounts[name]
    tokens = account.carried_tokens + steps * account.tokens_per_step
    return booked(fragment, name, carrying=False, start=steps, carried_tokens=tokens)


def open_account(fragment: Fragment, island: Island, *, carrying: bool) -> Fragment:
    """Open the account of a new incarnation: totals stay, the step count restarts.
    carrying: the incarnation began in an earlier term."""
    fresh = Account(
        incarnation=island.incarnation,
        session=island.session,
        tokens_per_step=island.tokens_per_step,
        carrying=carrying,
    )
    if (account := fragment.accounts.get(island.name)) is not None:
        fresh = replace(
            fresh,
            merged_tokens=account.merged_tokens,
            carried_tokens=account.carried_tokens,
            lost_tokens=account.lost_tokens,
            merges_in=account.merges_in,
            merges_alive=account.merges_alive,
        )
    return with_account(fragment, island.name, fresh)


def island_totals(config: PolicyConfig, state: State, name: str) -> Totals:
    """Return one island's tokens over all its incarnations."""
    accounts = [fragment.accounts[name] for fragment in state.fragments]
    reasons = dict.fromkeys(reason for a in accounts for reason in a.lost_tokens)
    lost = {
        reason: _weighted(config, [a.lost_tokens.get(reason, 0) for a in accounts])
        for reason in reasons
    }
    return Totals(
        computed=state.islands[name].computed_tokens,
        merged=_weighted(config, [a.merged_tokens for a in accounts]),
        lost={reason: tokens for reason, tokens in lost.items() if tokens},
        carried=_weighted(config, [a.carried_tokens for a in accounts]),
        merges_in=sum(account.merges_in for account in accounts),
        merges_alive=sum(account.merges_alive for account in accounts),
    )


def _weighted(config: PolicyConfig, tokens: Sequence[int]) -> int:
    """Return the mean of tokens by fragment, weighted by parameters and floored."""
    return by_size(config.fragment_sizes, tokens) // config.parameters


def by_size(sizes: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the sum of tokens by fragment, each times its fragment's parameters.

    Over the parameters of all fragments, floored, it is the number that a run tells."""
    return sum(size * each for size, each in zip(sizes, tokens, strict=True))


def run_totals(config: PolicyConfig, state: State) -> Totals:
    """Return the sums of tokens over all islands."""
    each = [island_totals(config, state, name) for name in state.islands]
    lost = Counter[str]()
    for totals in each:
        lost.update(totals.lost)
    return Totals(
        computed=sum(totals.computed for totals in each),
        merged=sum(totals.merged for totals in each),
        lost=dict(lost),
        carried=sum(totals.carried for totals in each),
        merges_in=sum(totals.merges_in for totals in each),
        merges_alive=sum(totals.merges_alive for totals in each),
    )


def merged_by_fragment(state: State, name: str = "") -> list[int]:
    """Return the merged tokens of every fragment, of one island or of all."""
    if name:
        return [f.accounts[name].merged_tokens for f in state.fragments]
    return [sum(a.merged_tokens for a in f.accounts.values()) for f in state.fragments]


def merged_into(fragment: Fragment) -> int:
    """Return the tokens of all deltas that were merged into a fragment, those of
    earlier terms included."""
    return sum(a.merged_tokens + a.carried_tokens for a in fragment.accounts.values())


def trained_tokens(config: PolicyConfig, state: State) -> int:
    """Return the tokens that the global parameters have been trained on: merged tokens
    and, in a later term, the carried ones."""
    totals = run_totals(config, state)
    return state.carried_progress + totals.carried + totals.merged


def progress_tokens(config: PolicyConfig, state: State) -> int:
    """Return the computed tokens that are not lost, over all islands and terms; the
    learning rate follows them. A fragment's lost tokens count by its share of the
    parameters."""
    computed = state.carried_progress + state.islands.computed_tokens
    lost = 0
    for fragment, size in zip(state.fragments, config.fragment_sizes, strict=True):
        if fragment.lost_in_all:
            lost += size * fragment.lost_in_all
    return computed - lost // config.parameters if lost else computed


def check(state: State, fragments: Iterable[Fragment] | None = None) -> list[str]:
    """List the errors in the books, as text; empty if the books balance.

    fragments: those of the state to look at; None for all.
    """
    looked_at = state.fragments if fragments is None else fragments
    return [wrong for fragment in looked_at for wrong in _wrong(state, fragment)]


def _wrong(state: State, fragment: Fragment) -> list[str]:
    wrong, lost_in_all = [], 0
    waiting: dict[str, int] = {}
    for c in fragment.left_behind:
        waiting[c.island] = waiting.get(c.island, 0) + c.tokens
    for c in fragment.merging:
        account = fragment.accounts[c.island]
        if account.incarnation != c.incarnation or account.start >= c.end:
            waiting[c.island] = waiting.get(c.island, 0) + c.tokens
    for name, account in fragment.accounts.items():
        island = state.islands[name]
        merging = waiting.get(name, 0)
        settled = island.tokens_before + account.start * account.tokens_per_step
        lost = sum(account.lost_tokens.values()) if account.lost_tokens else 0
        lost_in_all += lost
        booked = account.merged_tokens + lost + account.carried_tokens
        if booked + merging != settled:
            wrong.append(
                f"fragment {fragment.index}, island {name}: merged, lost and "
                f"carried {booked} + merging or left behind {merging} != settled "
                f"{settled} tokens"
            )
        if account.start > island.steps:
            wrong.append(
                f"fragment {fragment.index}, island {name}: settled to step "
                f"{account.start} of {island.steps}"
            )
    if fragment.lost_in_all != lost_in_all:
        wrong.append(
            f"fragment {fragment.index}: its accounts have lost {lost_in_all} tokens, "
            f"but its lost_in_all is {fragment.lost_in_all}"
        )
    return wrong


def lose_missing(state: State, fragment: Fragment, reason: LossReason) -> Fragment:
    """Book what ended incarnations lose in merges that never became durable, and in
    deltas that they left behind: nobody holds them any more. The fragment has neither
    any more."""
    for name, account in fragment.accounts.items():
        settled = account.start * account.tokens_per_step
        settled += state.islands[name].tokens_before
        missing = settled - account.merged_tokens - account.carried_tokens
        missing -= sum(account.lost_tokens.values())
        if missing > 0:
            account = account.lose_tokens(missing, reason)
            fragment = with_account(fragment, name, account)
    return fragment


def contributed(state: State, contributions: Iterable[Contribution]) -> State:
    """Return the state with the steps of a finished merge in it; recovery applies it
    too."""
    merged, departed = dict(state.in_merges), list(state.departed)
    for c in contributions:
        steps = Span(c.start, c.end)
        if state.islands[c.island].incarnation == c.incarnation:
            merged[c.island] = join_spans((*merged[c.island], steps))
        for index, ended in enumerate(departed):
            if (ended.island, ended.incarnation) == (c.island, c.incarnation):
                of = join_spans((*ended.in_merges, steps))
                departed[index] = replace(ended, in_merges=of)
    return replace(state, in_merges=merged, departed=tuple(departed))
