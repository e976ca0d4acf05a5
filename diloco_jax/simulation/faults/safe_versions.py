"""Safety of versions: they grow, they are the same everywhere, they stay.

What is committed is on the disk, and what is needed stays there. A fragment that was
lost, and a new term, go on from what an island had adopted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.events import Persist, Tell
from diloco_jax.protocol.coordinator.state import MERGES_KNOWN, PolicyConfig, State
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.protocol.messages import TakeRequest
from diloco_jax.protocol.records import Durable, Merged, TermBegun
from diloco_jax.protocol.values import FIRST_VERSION, Outstanding, Version
from diloco_jax.simulation.faults.arrays import Anchor, Delta
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Incarnation, Invariant, Key


class VersionsGrow(Invariant):
    """Every durable merge makes the version after the last one.

    A coordinator goes on at the version of the last durable merge. A new term is above
    all terms that the offering islands know. It goes on at the highest version that an
    island offered, if that island stayed.
    """

    name = "versions"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._versions = [Version()] * config.fragments

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged):
            fragment, version = record.fragment, record.version
            last = self._versions[fragment]
            self.hold(
                version == last.next(), "fragment {}: {} after", fragment, version, last
            )
            self._versions[fragment] = version
        elif isinstance(record, TermBegun):
            self._versions[record.fragment] = record.version

    def opened(self, opened: Opened) -> None:
        found = zip(opened.state.fragments, opened.replaced, strict=True)
        for fragment, anchor in found:
            index, version = fragment.index, fragment.version
            offered = [o.versions[index] for o in opened.offers.values()]
            self.hold(
                all(version.term > offer.term for offer in opened.offers.values())
                and version.number == anchor.version.number
                and anchor.version >= max(offered, default=Version()),
                "fragment {} begins at {} from {}; offered:",
                index,
                version,
                anchor.version,
                opened.offers,
            )
            self._versions[index] = version

    def recovered(self, state: State) -> None:
        for fragment, last in zip(state.fragments, self._versions, strict=True):
            self.hold(
                fragment.version == last,
                "fragment {}: recovered {}, durable is {}",
                fragment.index,
                fragment.version,
                last,
            )


class AdoptedStays(Invariant):
    """No version that an island adopted ever goes back.

    This holds on the island and in a coordinator that comes up. A coordinator without
    state goes by the offers: versions that only other islands had adopted are in no new
    term.
    """

    name = "adopted"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._newest = [Version()] * config.fragments
        self._by_island: dict[tuple[Incarnation, int], Version] = {}

    def adopted(
        self, who: Incarnation, fragment: int, anchor: Anchor, *, kept: bool
    ) -> None:
        before = self._by_island.get((who, fragment))
        self.hold(
            before is None or anchor.version > before,
            "{} adopts {} of fragment {} after {}",
            who,
            anchor.version,
            fragment,
            before,
        )
        self._by_island[who, fragment] = anchor.version
        self._newest[fragment] = max(self._newest[fragment], anchor.version)

    def recovered(self, state: State) -> None:
        for fragment, newest in zip(state.fragments, self._newest, strict=True):
            self.hold(
                fragment.version >= newest,
                "fragment {}: a coordinator comes up at {}, an island has adopted {}",
                fragment.index,
                fragment.version,
                newest,
            )


class AnchorsEqual(Invariant):
    """A version of a fragment has one value everywhere.

    It is the same at the coordinator before and after a crash, and on every island that
    adopted it. A new term begins with a value that was adopted.
    """

    name = "anchors"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._values: dict[tuple[int, Version], bytes] = {}
        self._adopted: set[tuple[int, Version]] = set()

    def opened(self, opened: Opened) -> None:
        term = opened.anchors[0].version.term
        for key in [k for k in self._values if k[1].term == term]:
            if key not in self._adopted:
                del self._values[key]  # A lost term that no island heard of.
        for fragment, replaced in enumerate(opened.replaced):
            self.published(fragment, replaced)
            self.published(fragment, opened.anchors[fragment])
            same = opened.anchors[fragment].value == replaced.value
            self.hold(same, "fragment {} came as", fragment, replaced)

    def published(self, fragment: int, anchor: Anchor) -> None:
        value = self._values.setdefault((fragment, anchor.version), anchor.value)
        self.hold(
            value == anchor.value,
            "fragment {}, {}: value {} and {}",
            fragment,
            anchor.version,
            anchor.value,
            value,
        )

    def adopted(
        self, who: Incarnation, fragment: int, anchor: Anchor, *, kept: bool
    ) -> None:
        self._adopted.add((fragment, anchor.version))
        self.published(fragment, anchor)


class TicksOnce(Invariant):
    """One tick's number names one fragment's deltas of one life of the coordinator.

    A delta asked for before a crash is never taken for another one after it.
    """

    name = "ticks"
    effects = (TakeRequest,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._life = 0
        self._of: dict[int, tuple[int, int]] = {}
        self._takes: set[Key] = set()

    def recovered(self, state: State) -> None:
        self._life += 1

    def carrying_out(self, effect: AnyEffect) -> None:
        match effect:
            case Tell(message=TakeRequest(fragment=fragment, tick=tick)):
                use = (fragment, self._life)
                first = self._of.setdefault(tick, use)
                what = "a tick has a second (fragment, life); this, and the first:"
                self.hold(first == use, what, tick, use, first)

    def took(self, who: Incarnation, take: Outstanding, delta: Delta) -> None:
        key = (*who, take.fragment, take.tick)
        self.hold(key not in self._takes, "taken a second time:", key)
        self._takes.add(key)


class CyclesWhole(Invariant):
    """A kept cycle has, of each fragment, the version of the last merge up to its turn.

    It has this version whatever is merged later, and in every life of a coordinator.
    """

    name = "cycles"
    effects = (KeepFragment,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._versions = [Version()] * config.fragments
        self._ticks = [0] * config.fragments
        self._kept_to = [0] * config.fragments
        """Last turn that was kept of each fragment."""

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged):
            fragment, tick = record.fragment, record.tick
            self.hold(
                tick > self._kept_to[fragment],
                "fragment {} is merged at tick {}, and was kept for tick {}",
                fragment,
                tick,
                self._kept_to[fragment],
            )
            self._versions[fragment], self._ticks[fragment] = record.version, tick
        elif isinstance(record, TermBegun):
            self._versions[record.fragment] = record.version

    def opened(self, opened: Opened) -> None:
        for fragment in opened.state.fragments:
            self._versions[fragment.index] = fragment.version

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        """See Invariant. An order to keep something is checked when it is decided."""
        versions, ticks = list(self._versions), list(self._ticks)
        for effect in effects:
            match effect:
                case Persist(record=Merged() as r):
                    versions[r.fragment], ticks[r.fragment] = r.version, r.tick
                case Persist(record=TermBegun() as r):
                    versions[r.fragment] = r.version
                case KeepFragment(fragment=fragment):
                    version, tick = versions[fragment], ticks[fragment]
                    self.hold(
                        effect.version == version and tick <= self._turn(effect),
                        "it is at {}, merged at tick {}:",
                        version,
                        tick,
                        effect,
                    )

    def carrying_out(self, effect: AnyEffect) -> None:
        if isinstance(effect, KeepFragment):
            self._kept_to[effect.fragment] = self._turn(effect)

    def _turn(self, kept: KeepFragment) -> int:
        return (kept.cycle - 1) * len(self._versions) + kept.fragment + 1


class PreparedFirst(Invariant):
    """The publish of a merge is whole on the disk before the record that commits it. So
    is the anchor with which a lost fragment begins a term. What a worker has prepared
    and was not committed when it comes back is gone.
    """

    name = "prepared"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._prepared: dict[tuple[int, Version], str] = {}

    def worker_back(self, fragments: Sequence[int]) -> None:
        kept = {k: v for k, v in self._prepared.items() if k[0] not in fragments}
        self._prepared = kept

    def prepared(self, fragment: int, version: Version, digest: str) -> None:
        self._prepared[fragment, version] = digest

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged | TermBegun):
            found = self._prepared.get((record.fragment, record.version))
            self.hold(
                found == record.digest,
                "on the disk is {}, and committed:",
                found,
                record,
            )


class _Committed(Invariant):
    """Base: the version of the last durable merge, by fragment."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._versions = [Version()] * config.fragments

    def persisted(self, record: Durable) -> None:
        if isinstance(record, Merged | TermBegun):
            self._versions[record.fragment] = record.version

    def opened(self, opened: Opened) -> None:
        self._versions = [fragment.version for fragment in opened.state.fragments]


class ChainsKept(_Committed):
    """From every snapshot of a fragment in its term that is kept, publishes on the disk
    lead to its last committed version: any snapshot but one may turn out not to read.
    """

    name = "chains"

    def cut(
        self,
        fragment: int,
        saved: Sequence[Version],
        published: Mapping[Version, bytes],
    ) -> None:
        committed = self._versions[fragment]
        version = min(v for v in saved if v.term == committed.term)
        while version < committed:
            version = version.next()
            self.hold(
                version in published,
                "fragment {}: snapshots {}, committed is {}, but no publish {}",
                fragment,
                saved,
                committed,
                version,
            )


class RestoredExactly(_Committed):
    """A coordinator comes up with the last committed version of every fragment: not
    with an older one, and not with one that was prepared and never committed.
    """

    name = "restored"

    def restored(self, fragment: int, anchor: Anchor) -> None:
        committed = self._versions[fragment]
        self.hold(
            anchor.version == committed,
            "fragment {} comes up at {}, committed is {}",
            fragment,
            anchor.version,
            committed,
        )


class GatheredExactly(Invariant):
    """A fragment that was lost goes on from an anchor that an island had adopted, in
    the fragment's next term: with the number and the value of that anchor. Exactly what
    was merged into versions above it is lost. No other fragment begins a term.
    """

    name = "gathered"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._begin([FIRST_VERSION] * config.fragments)

    def _begin(self, versions: list[Version]) -> None:
        self._merged = [{version: dict[str, int]()} for version in versions]
        """Tokens by island in each version whose merges count, by fragment."""
        self._adopted: dict[tuple[int, Version], bytes] = {}
        self._lost: set[int] = set()
        self._begun: dict[tuple[int, Version], bytes] = {}

    def opened(self, opened: Opened) -> None:
        self._begin([fragment.version for fragment in opened.state.fragments])

    def lost(self, fragments: tuple[int, ...]) -> None:
        self._lost |= set(fragments)

    def adopted(
        self, who: Incarnation, fragment: int, anchor: Anchor, *, kept: bool
    ) -> None:
        self._adopted[fragment, anchor.version] = anchor.value
        value = self._begun.get((fragment, anchor.version), anchor.value)
        same = value == anchor.value
        self.hold(same, "{}: fragment {} is not", who, fragment, anchor)

    def persisted(self, record: Durable) -> None:
        match record:
            case Merged():
                tokens: dict[str, int] = {}
                for c in record.contributions:
                    tokens[c.island] = tokens.get(c.island, 0) + c.tokens
                self._merged[record.fragment][record.version] = tokens
            case TermBegun():
                self._term_begins(record)

    def _term_begins(self, record: TermBegun) -> None:
        fragment, merged = record.fragment, self._merged[record.fragment]
        self.hold(fragment in self._lost, "it was not lost:", record)
        self._lost.discard(fragment)
        newest = max(merged)
        self.hold(
            record.version == Version(newest.term + 1, record.replaced.number)
            and record.replaced in list(merged)[-MERGES_KNOWN:],
            "after {}:",
            newest,
            record,
        )
        value = self._adopted.get((fragment, record.replaced))
        self.hold(
            value is not None and value.hex() == record.digest,
            "no island has adopted that; {}:",
            value,
            record,
        )
        lost: dict[str, int] = {}
        for version in [v for v in merged if v > record.replaced]:
            for name, tokens in merged.pop(version).items():
                lost[name] = lost.get(name, 0) + tokens
        same = lost == record.lost_tokens
        self.hold(same, "{} were merged after it:", lost, record)
        merged[record.version] = {}
        assert value is not None
        self._begun[fragment, record.version] = value
