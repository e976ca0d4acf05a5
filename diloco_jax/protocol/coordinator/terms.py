"""Begin a term, once its anchors are found: the first state of a run whose
log is lost, or the records with which lost fragments go on in a log that is whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import members, schedule
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    Fragment,
    MergedTokens,
    PolicyConfig,
    State,
    initial,
    with_account,
    with_fragment,
)
from diloco_jax.protocol.holding import AnchorKept
from diloco_jax.protocol.values import WORKER, Version


class FoundTerm(msgspec.Struct, frozen=True, kw_only=True):
    """The search is over: its holders have all anchors on disk, none visible yet."""

    run_id: str
    term: int
    name: str
    anchors: tuple[AnchorKept, ...]
    tokens: int
    next_position: int
    offered: tuple[str, ...] = ()
    """Islands that offered anchors; they come again as the term begins."""


def first_state(config: PolicyConfig, found: FoundTerm) -> State:
    """Return the state of a run whose log is lost at the beginning of the term."""
    state = initial(config)
    for anchor in found.anchors:
        # Islands have the anchor under its old name until they adopt the new one.
        versions = (anchor.replaced, anchor.version)
        newest = tuple(MergedTokens(version=version) for version in versions)
        fragment = state.fragments[anchor.fragment]
        begun = replace(fragment, version=anchor.version, newest=newest)
        state = with_fragment(state, begun)
    tick = schedule.ticks_before(config, found.term)
    let_in = [n for n in found.offered if not members.unknown(config, n)]
    return replace(
        state,
        returning=tuple(let_in),
        tick=tick,
        ticks_reserved=tick,
        term=found.term,
        term_name=found.name,
        books=found.term,
        progress_tokens=found.tokens,
        carried_progress=found.tokens,
        next_position=found.next_position,
    )


def term_records(state: State, found: FoundTerm) -> list[records.TermBegun]:
    """Return the records with which lost fragments begin the run's next term."""
    return [
        records.TermBegun(
            island=anchor.island,
            incarnation=anchor.incarnation,
            fragment=anchor.fragment,
            version=anchor.version,
            name=found.name,
            replaced=anchor.replaced,
            lost_tokens=_merged_above(state.fragments[anchor.fragment], anchor),
            digest=anchor.digest,
        )
        for anchor in found.anchors
    ]


def fragment_begun(state: State, record: records.TermBegun) -> State:
    """Return the state once a lost fragment has begun a new term, as recovery applies
    it. What was merged into versions above the anchor's is lost; takes against them
    are stale, and their steps stay with the islands."""
    fragment = state.fragments[record.fragment]
    for name, tokens in record.lost_tokens.items():
        account = fragment.accounts[name]
        account = replace(account, merged_tokens=account.merged_tokens - tokens)
        account = account.lose_tokens(tokens, WORKER)
        fragment = with_account(fragment, name, account)
    phase = FRAGMENT.move(FRAGMENT.move(fragment.phase, "recover"), "begin term")
    newest = tuple(m for m in fragment.newest if m.version <= record.replaced)
    fragment = replace(
        fragment,
        version=record.version,
        phase=phase,
        newest=(*newest, MergedTokens(version=record.version)),
    )
    state = with_fragment(state, fragment)
    return replace(state, term=record.version.term, term_name=record.name)


def versions_known(
    fragment: Fragment, digests: Mapping[Version, str]
) -> dict[Version, str]:
    """Return the versions after which the log knows all merges, for `Aim.known`.
    digests: of anchors, where the tape has them."""
    return {m.version: digests.get(m.version, "") for m in fragment.newest}


def _merged_above(fragment: Fragment, anchor: AnchorKept) -> dict[str, int]:
    lost: dict[str, int] = {}
    for merged in fragment.newest:
        if merged.version > anchor.replaced:
            for name, tokens in merged.by_island.items():
                lost[name] = lost.get(name, 0) + tokens
    return lost
