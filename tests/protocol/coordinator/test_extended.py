"""A run that is over goes on to more tokens."""

from kit import Driver, asked, joined, kinds, only, persisted
from msgspec.structs import replace

from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.events import RunExtended
from diloco_jax.protocol.coordinator.recovery import recover
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.messages import Refused, Welcome
from diloco_jax.protocol.values import Version


def over(**changes: int) -> Driver:
    """Island a has made the 10 steps of the run, all of which are merged."""
    d = joined("a", total_tokens=100, **changes)
    d.report("a", 10)
    d.report("a", phase="stopped")
    for fragment in (0, 1):
        d.take("a", fragment, 10)
        d.computed(fragment)
    assert d.state.phase == "done"
    return d


def extended(tokens: int = 200) -> Driver:
    """The coordinator is back with a config of more tokens."""
    d = over()
    d.config = replace(d.config, total_tokens=tokens)
    d.crash()
    d.feed(RunExtended())
    return d


def test_it_runs_again_and_the_log_says_to_which_tokens() -> None:
    d = over()
    versions = [f.version for f in d.state.fragments]
    d.config = replace(d.config, total_tokens=200)
    effects = d.feed(RunExtended())
    assert persisted(effects, "extended") == [{"kind": "extended", "total_tokens": 200}]
    assert d.state.phase == "running"
    assert [f.phase for f in d.state.fragments] == ["idle", "idle"]
    assert not any(f.final for f in d.state.fragments)
    assert [f.version for f in d.state.fragments] == versions


def test_what_was_done_counts_and_the_rest_is_trained() -> None:
    d = extended()
    assert only(d.hello("a", 1), Refused).code == "fenced"
    welcome = only(d.hello("a", 2), Welcome)
    assert not welcome.resumed
    assert asked(d.report("a", 2)) == {0: ["a"]}
    merge = only(d.take("a", 0, 2), Merge)
    assert (merge.version, merge.final) == (Version(1, 2), False)
    d.computed(0)
    assert d.state.progress_tokens == 120
    d.report("a", 10)
    assert d.state.phase == "stopping"
    totals = ledger.run_totals(d.config, d.state)
    assert totals.computed == 200


def test_the_data_goes_on_where_it_was() -> None:
    d = over()
    position, free = d.state.next_position, d.state.free_spans
    d.config = replace(d.config, total_tokens=200)
    d.feed(RunExtended())
    assert (d.state.next_position, d.state.free_spans) == (position, free)


def test_an_extension_survives_a_crash() -> None:
    """From the snapshot of before the end, and from that of the end."""
    d = extended()
    for snapshot, after in ((initial(d.config), 0), (d.state, len(d.log))):
        again = recover(d.config, snapshot, d.log[after:], d.now)
        assert again.phase == "running"
        assert [f.phase for f in again.fragments] == ["idle", "idle"]
        assert not any(f.final for f in again.fragments)
        assert again.progress_tokens == 100


def test_a_run_with_its_tokens_or_on_its_way_is_left_as_it_is() -> None:
    d = over()
    before = d.state
    assert d.feed(RunExtended()) == []
    assert d.state == before
    running = joined("a", total_tokens=100)
    before = running.state
    assert kinds(running.feed(RunExtended())) == []
    assert running.state == before
