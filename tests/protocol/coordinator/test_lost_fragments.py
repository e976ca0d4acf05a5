"""A worker loses its disk: its fragments are gathered from islands, each under a new
term of its own."""

from kit import Driver, notes, of, only, persisted, verdicts

from diloco_jax.protocol.coordinator.events import Alert, Timer, WorkerAway, WorkerBack
from diloco_jax.protocol.coordinator.state import MERGES_KNOWN
from diloco_jax.protocol.holding import AnchorKept, AwaitAnchor, Commit
from diloco_jax.protocol.messages import AnchorRequest, Published
from diloco_jax.protocol.values import Version

LEASE_S, OUTAGE_S = 100.0, 30.0


class Gathering(Driver):
    """Islands a and b; fragment 0 is merged into version 2 from 2 steps of each, and
    then into version 3. Worker 0 has it."""

    def __init__(self, **changes: int) -> None:
        super().__init__(**{"quorum": 2, "workers": 2, **changes})
        self.join("a", "b")
        self.steps = 0
        self.turn(0)
        self.turn(1)

    def turn(self, fragment: int) -> None:
        """Two more steps, after which the fragment is taken and merged."""
        self.steps += 2
        for name in "ab":
            self.report(name, self.steps)
        self.merge(fragment, a=self.steps, b=self.steps)

    def adopt(self, name: str, number: int, term: int = 1, fragment: int = 0) -> None:
        version = Version(term, number)
        record = self.record(
            name, "adopted", self.steps, fragment=fragment, version=version
        )
        self.report(name, self.steps, record)

    def lose(self, *fragments: int) -> list:
        self.feed(WorkerAway(worker=0))
        return self.feed(WorkerBack(worker=0, lost=fragments or (0,)))

    def kept(self, island: str, number: int, *, term: int = 2, of_term: int = 1) -> list:
        """The worker has kept the anchor of this version on an island."""
        return self.feed(
            AnchorKept(
                fragment=0,
                island=island,
                incarnation=self.state.islands[island].incarnation,
                replaced=Version(of_term, number),
                version=Version(term, number),
                digest="d",
            )
        )


def requests(effects: list) -> list[tuple[str, int, int]]:
    return [(t.island, t.fragment, t.term) for t in of(effects, AnchorRequest)]


def test_an_island_with_the_committed_version_is_asked_at_once() -> None:
    d = Gathering()
    d.adopt("b", 1)
    effects = d.lose()
    assert requests(effects) == [("b", 0, 2)]
    awaited = only(effects, AwaitAnchor)
    assert (awaited.island, awaited.incarnation, awaited.term) == ("b", 1, 2)
    texts = [alert.text for alert in of(effects, Alert)]
    assert any("worker 0 has lost its fragments [0]" in text for text in texts)


def test_the_term_begins_with_its_record_and_loses_nothing() -> None:
    d = Gathering()
    d.adopt("b", 1)
    d.lose()
    effects = d.kept("b", 1)
    (record,) = persisted(effects, "term_begun")
    assert record["version"] == [2, 1]
    assert (record["replaced"], record["lost_tokens"]) == ([1, 1], {})
    commit = only(effects, Commit)
    order = [type(effect).__name__ for effect in effects]
    assert order[:2] == ["Persist", "Commit"]
    assert commit.version == Version(2, 1)
    assert {told.version for told in of(effects, Published)} == {Version(2, 1)}
    assert not d.fragment(0).away
    assert (d.state.term, d.fragment(1).version) == (1, Version(1, 1))
    assert d.totals("a").lost == {}


def test_what_was_merged_above_the_anchor_is_lost_and_nothing_else() -> None:
    d = Gathering()
    for name in "ab":
        d.adopt(name, 1)
    d.turn(0)
    merged = d.account("a", 0).merged_tokens
    assert requests(d.lose()) == [], "an island may have version 2"
    effects = d.wait(LEASE_S)
    d.report("a"), d.report("b")
    assert requests(effects) == []
    effects = d.report("a")
    d.kept("a", 1)
    (record,) = [r for r in d.log if type(r).__name__ == "TermBegun"]
    assert record.lost_tokens == {"a": 40, "b": 40}
    for name in "ab":
        account = d.account(name, 0)
        assert account.merged_tokens == merged - 40
        assert account.lost_tokens == {"worker": 40}
    assert d.fragment(0).version == Version(2, 1)
