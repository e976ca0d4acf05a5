"""Gather a fragment that its worker has lost from an island's anchor.

Rules of this file: the lead's log and books are whole, only the fragment's arrays are
gone. One island is asked for its anchor: that with the highest version, for which the
lead waits up to a lease, unless one has the committed version. The worker keeps the
anchor as the first snapshot of a new term of this fragment alone; the lead's record
begins the term. Tokens that were merged into versions above the anchor's are lost
(reason `worker`), so the anchor must be of a version after which every merge is known:
one of `Fragment.newest`. Takes against the term before are refused as stale; islands
keep their steps, and the next take has them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import fragments
from diloco_jax.protocol.coordinator.events import (
    Alert,
    Effect,
    FragmentsLost,
    Tell,
)
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    Fragment,
    Lost,
    MergedTokens,
    PolicyConfig,
    State,
    ignored,
    with_account,
    with_fragment,
)
from diloco_jax.protocol.holding import AnchorKept, AwaitAnchor
from diloco_jax.protocol.messages import AnchorRequest
from diloco_jax.protocol.values import WORKER, Verdict, Version

Step = tuple[State, list[Effect]]


def lose(config: PolicyConfig, state: State, event: FragmentsLost, now: float) -> Step:
    """Note at a start that a worker has lost fragments."""
    for index in event.fragments:
        lost = Lost(hopes_until=now + config.lease_s)
        state = with_fragment(state, replace(state.fragments[index], lost=lost))
    lost_now = sorted({*state.lost, *event.fragments})
    text = (
        f"worker {event.worker} has lost its fragments {list(event.fragments)}: their "
        f"files are gone or damaged, see its log. They are gathered from islands"
    )
    return replace(state, lost=tuple(lost_now)), [Alert(text=text)]


def advance(config: PolicyConfig, state: State, now: float) -> Step:
    """Ask for the anchors of lost fragments, one island for each."""
    effects: list[Effect] = []
    for index in state.lost:
        fragment, asks = _search(config, state.fragments[index], state.islands, now)
        state = with_fragment(state, fragment)
        effects += asks
    return state, effects


def deadline(lost: Lost) -> float:
    """Return the time at which time alone changes something in a search."""
    return lost.until if lost.island else lost.hopes_until


def kept(config: PolicyConfig, state: State, event: AnchorKept) -> Step:
    """Begin the new term of a fragment with the anchor that its worker has kept."""
    fragment = state.fragments[event.fragment]
    lost = fragment.lost
    if (
        lost is None
        or not _is_awaited(lost, event)
        or event.version != _in_next_term(fragment, event.replaced)
    ):
        return state, [ignored("fragment", "found", "anchor")]
    if not _is_known(fragment, event.replaced):
        # It has adopted another version since it was asked.
        lost = replace(lost, island="", failed=(*lost.failed, event.island))
        return with_fragment(state, replace(fragment, lost=lost)), []
    record = records.TermBegun(
        island=event.island,
        incarnation=event.incarnation,
        fragment=fragment.index,
        version=event.version,
        replaced=event.replaced,
        lost_tokens=_merged_above(fragment, event.replaced),
        digest=event.digest,
    )
    fragment = begun(fragment, record)
    others = tuple(f for f in state.lost if f != fragment.index)
    state = with_fragment(replace(state, lost=others), fragment)
    verdicts: dict[str, tuple[int, Verdict, str]] = {}
    effects: list[Effect] = []
    for name in sorted(fragment.accounts):
        fragment, verdict, refusals = fragments.outstanding(config, fragment, name)
        effects += refusals
        if verdict is not None:
            verdicts[name] = verdict
    state = with_fragment(state, fragment)
    text = (
        f"fragment {fragment.index}, which its worker had lost, goes on at version "
        f"{tuple(event.version)} with the anchor {tuple(event.replaced)} of island "
        f"{event.island!r}, without outer momentum; {sum(record.lost_tokens.values())} "
        f"merged tokens are lost with what came after it"
    )
    visible = fragments.committed(state, fragment, record, verdicts)
    return state, [*visible, *effects, Alert(text=text)]


def begun(fragment: Fragment, record: records.TermBegun) -> Fragment:
    """Return a fragment that begins its new term; recovery applies it too. What was
    merged into versions above the anchor's is lost."""
    for name, tokens in record.lost_tokens.items():
        account = fragment.accounts[name]
        account = replace(account, merged_tokens=account.merged_tokens - tokens)
        account = account.lose_tokens(tokens, WORKER)
        fragment = with_account(fragment, name, account)
    phase = FRAGMENT.move(FRAGMENT.move(fragment.phase, "recover"), "begin term")
    newest = tuple(m for m in fragment.newest if m.version <= record.replaced)
    return replace(
        fragment,
        version=record.version,
        phase=phase,
        merging=(),
        lost=None,
        newest=(*newest, MergedTokens(version=record.version)),
    )


def _search(
    config: PolicyConfig,
    fragment: Fragment,
    islands: Mapping[str, Island],
    now: float,
) -> tuple[Fragment, list[Effect]]:
    """Ask the island with the highest version, unless one that was asked may answer."""
    lost = fragment.lost
    assert lost is not None
    failed = lost.failed
    if lost.island:
        asked = islands[lost.island]
        sends = asked.answers and asked.incarnation == lost.incarnation
        if sends:
            if now < lost.until:
                return fragment, []
            failed = (*failed, lost.island)
    versions = {
        name: account.adopted
        for name, account in fragment.accounts.items()
        if islands[name].answers and _is_known(fragment, account.adopted)
    }
    sound = {n: v for n, v in versions.items() if not islands[n].quarantined}
    versions = sound or versions
    if versions.keys() <= set(failed):
        failed = ()  # Each of them has had its time: begin anew.
    able = {name: v for name, v in versions.items() if name not in failed}
    best = max(able.values(), default=None)
    hopes = now < lost.hopes_until
    if best is None or (hopes and best < fragment.version):
        lost = replace(lost, island="", failed=failed)
        return replace(fragment, lost=lost), []
    name = min(name for name, version in able.items() if version == best)
    island = islands[name]
    lost = replace(
        lost,
        island=name,
        incarnation=island.incarnation,
        until=now + config.outage_budget_s,
        failed=failed,
    )
    fragment = replace(fragment, lost=lost)
    awaited = AwaitAnchor(
        fragment=fragment.index,
        island=name,
        incarnation=island.incarnation,
        term=fragment.version.term + 1,
    )
    return fragment, [awaited, *ask_again(fragment, island)]


def ask_again(fragment: Fragment, island: Island) -> list[Effect]:
    """Ask an island for the anchor that is awaited from it, if any is: the request may
    be lost with an old connection."""
    lost = fragment.lost
    if lost is None or lost.island != island.name:
        return []
    term = fragment.version.term + 1
    request = AnchorRequest(fragment=fragment.index, term=term)
    return [Tell(session=island.session, message=request)]


def _is_awaited(lost: Lost, event: AnchorKept) -> bool:
    asked = (lost.island, lost.incarnation)
    return asked == (event.island, event.incarnation)


def _in_next_term(fragment: Fragment, version: Version) -> Version:
    return Version(fragment.version.term + 1, version.number)


def _is_known(fragment: Fragment, version: Version) -> bool:
    """Tell whether all merges after that version are known, none of them in it."""
    return any(merged.version == version for merged in fragment.newest)


def _merged_above(fragment: Fragment, version: Version) -> dict[str, int]:
    lost: dict[str, int] = {}
    for merged in fragment.newest:
        if merged.version > version:
            for name, tokens in merged.by_island.items():
                lost[name] = lost.get(name, 0) + tokens
    return lost
