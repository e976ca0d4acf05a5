"""Published values are kept for as long as the tape needs them, and no longer."""

from pathlib import Path

import numpy as np
import pytest

from diloco_jax.config import Config, IslandConfig
from diloco_jax.core.fragment_merge import FragmentState, MergeMeasures, MergeResult
from diloco_jax.protocol.values import Record, Version
from diloco_jax.simulation.replay.published import PublishedVersions
from diloco_jax.simulation.replay.recording import (
    Digests,
    Life,
    RecordedMerge,
    Recording,
    Recovery,
    TapedRecord,
    Who,
)

V = [Version(1, n) for n in range(4)]


def life(name, *adopted):
    records = [
        Record(seq=n, kind="adopted", step=n - 1, fragment=0, version=version)
        for n, version in enumerate(adopted, start=1)
    ]
    return Life(
        who=Who(name, 1),
        config=IslandConfig(),
        environment={},
        total_tokens=1,
        records=[TapedRecord(record.seq, record) for record in records],
    )


def anchor(number):
    return (np.full(2, number, np.float32), np.full(1, number, np.float32))


@pytest.fixture
def published():
    """One fragment, four versions; one island begins with the first and adopts the
    others, one begins with the third; a coordinator came back with the second."""
    merges = tuple(
        RecordedMerge(
            line=n,
            number=n,
            fragment=0,
            version=V[n],
            final=False,
            contributions=(),
            share=1.0,
            digests=Digests(publish=""),
        )
        for n in (1, 2, 3)
    )
    lives = [life("a", V[0], V[1], V[3]), life("b", V[2])]
    recording = Recording(
        workdir=Path(),
        config=Config(),
        plan_digest="",
        coordinators=(),
        merges=merges,
        merges_on_tape=3,
        recoveries=(Recovery(merges=1, snapshot_versions=(V[0],)),),
        lives={life.who: life for life in lives},
    )
    published = PublishedVersions(recording, [anchor(0)])
    for n in (1, 2, 3):
        merged = MergeResult(
            state=FragmentState((), anchor(n), None, ()),
            payload=b"%d" % n,
            norm=0.0,
            measures=MergeMeasures(),
            sample=(),
            directions=(),
        )
        published.keep(0, V[n], merged)
    return published


def test_each_use_on_the_tape_is_served_once(published):
    assert published.anchor(0, V[0]) == np.zeros(3, np.float32).tobytes()
    assert published.anchor(0, V[2]) == np.full(3, 2, np.float32).tobytes()
    assert published.publish(0, V[1]) == b"1"
    assert published.chain(0, V[0], V[1]) == [b"1"]
    assert published.chain(0, V[1], V[3]) == [b"2", b"3"]
    for version in V:
        with pytest.raises(KeyError):
            published.anchor(0, version)
        with pytest.raises(KeyError):
            published.publish(0, version)


@pytest.mark.parametrize("version", [V[1], V[3]])
def test_what_nobody_needs_is_not_kept(published, version):
    with pytest.raises(KeyError):
        published.anchor(0, version)
