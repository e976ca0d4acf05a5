"""The last snapshots: what is in none yet, as far as there is time."""

from types import SimpleNamespace

import pytest

from diloco_jax.coordinator.holding.fragment_snapshots import Saver
from diloco_jax.protocol.values import Version

NEWEST = Version(1, 2)


class Snapshots:
    """Fragment 1 is in a snapshot already."""

    fragments = (0, 1, 2)

    def __init__(self):
        self.saved = []

    def unsaved(self, current):
        return [f for f in range(len(current)) if f != 1]

    def save(self, fragment, version, arrays):
        self.saved.append((fragment, version))

    def oldest_of(self, fragment):
        return NEWEST


@pytest.mark.parametrize(
    ("within_s", "saved"), [(None, [0, 2]), (60.0, [0, 2]), (0.0, [])]
)
def test_fragments_are_written_as_far_as_there_is_time(within_s, saved):
    snapshots, forgotten = Snapshots(), []
    saver = Saver(
        SimpleNamespace(
            versions=lambda: [NEWEST] * 3, current=lambda fragment: (NEWEST, {})
        ),
        snapshots,
        SimpleNamespace(forget=lambda *through: forgotten.append(through)),
    )
    saver.write_last(within_s)
    assert snapshots.saved == forgotten == [(fragment, NEWEST) for fragment in saved]
