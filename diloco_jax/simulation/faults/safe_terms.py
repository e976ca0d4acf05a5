"""Safety of fragments that their workers have lost."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.state import MERGES_KNOWN, PolicyConfig
from diloco_jax.protocol.records import Durable, Merged, TermBegun
from diloco_jax.protocol.values import FIRST_VERSION, Version
from diloco_jax.simulation.faults.arrays import Anchor
from diloco_jax.simulation.faults.gatherer import Opened
from diloco_jax.simulation.faults.observing import Incarnation, Invariant


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
