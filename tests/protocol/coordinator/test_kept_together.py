"""The sums that a state keeps of its islands and fragments are those of each."""

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.islands import Islands
from diloco_jax.protocol.coordinator.state import Fragment, Fragments, State, restored
from diloco_jax.simulation.faults.coordinator import FaultyCoordinator
from diloco_jax.simulation.faults.play import play_seed

SEEDS = 12


@pytest.fixture(scope="module")
def states():
    """All states of some schedules of faults, whose islands come, blink and go."""
    seen: list[State] = []
    decide = FaultyCoordinator.decide

    def watched(self, event, now):
        effects = decide(self, event, now)
        seen.append(self.state)
        return effects

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyCoordinator, "decide", watched)
        for seed in range(SEEDS):
            assert play_seed(seed).wrong is None
    return seen


def test_islands_are_counted_as_if_each_was_looked_at(states):
    standings = set()
    for state in states:
        islands, anew = state.islands, Islands(state.islands.values())
        assert islands.standing == anew.standing
        assert islands.computed_tokens == anew.computed_tokens
        standings.add(repr(islands.standing))
    assert len(standings) > 20


def test_no_lease_ends_before_the_time_until_which_none_is_looked_at(states):
    kept = [(s.islands.expiry, Islands(s.islands.values()).expiry) for s in states]
    assert all(kept <= exact for kept, exact in kept)
    assert len({kept for kept, _ in kept}) > 20


def test_who_is_quarantined_is_known(states):
    islands = states[-1].islands
    assert islands.standing.quarantined == ()
    apart = islands.having(replace(islands["a"], quarantined=True))
    assert apart.standing.quarantined == ("a",)
    assert apart.having(islands["a"]).standing == islands.standing


def test_open_fragments_are_known(states):
    for state in states:
        assert state.fragments.open_ones == Fragments(state.fragments).open_ones
    assert {s.fragments.open_ones for s in states} >= {(), (0,), (1,), (0, 1)}


def test_the_order_of_fragments_that_open_does_not_matter():
    fragments = Fragments(Fragment(index=index) for index in range(3))
    for index in (2, 0):
        fragments = fragments.having(replace(fragments[index], phase="open"))
    assert fragments.open_ones == (0, 2)
    fragments = fragments.having(replace(fragments[0], phase="merging"))
    assert fragments.open_ones == (2,)


def test_a_state_is_read_as_it_was_written(states):
    state = max(states, key=lambda state: len(state.fragments.open_ones))
    read = restored(to_builtins(state))
    assert read == state
    assert read.islands.standing == state.islands.standing
    assert read.fragments.open_ones == state.fragments.open_ones != ()
    newcomer = replace(state.islands["a"], name="new")
    assert "new" in read.islands.having(newcomer)
    assert "new" not in read.islands
