"""The last snapshots: what is in none yet, as far as there is time."""

from types import SimpleNamespace

import pytest

from diloco_jax.coordinator.saver import Saver
from diloco_jax.protocol.values import Version

NEWEST = Version(1, 2)


class Snapshots:
    """Fragment 1 is in a snapshot already."""

    def __init__(self):
        self.saved = []

    def unsaved(self, current):
        return [f for f in range(len(current)) if f != 1]

    def save_state(self, number, state):
        self.saved.append("state")

    def save_fragment(self, fragment, version, arrays):
        self.saved.append(fragment)

    def oldest(self):
        return 0

    def oldest_of(self, fragment):
        return NEWEST


@pytest.mark.parametrize(
    ("within_s", "saved"),
    [(None, ["state", 0, 2]), (60.0, ["state", 0, 2]), (0.0, ["state"])],
)
def test_the_state_comes_first_and_fragments_as_far_as_there_is_time(within_s, saved):
    snapshots = Snapshots()
    saver = Saver(
        SimpleNamespace(arrays=lambda fragment: {}),
        snapshots,
        SimpleNamespace(forget=lambda fragment, through: None),
        SimpleNamespace(rotate=lambda: 7, forget=lambda through: None),
    )
    state = SimpleNamespace(fragments=[SimpleNamespace(version=NEWEST)] * 3)
    saver.save_all(state, within_s)
    assert snapshots.saved == saved
