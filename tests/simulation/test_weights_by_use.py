"""Runs whose tables are weighed by use: emulated, with kills and refused takes, and
repeated from their tape, which has the digests of all counts."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from emulate_support import check_books, make_config, record, with_placement
from msgspec.structs import replace
from test_replay import FAULTS, OPTIONS, Here

from diloco_jax import Config, ConfigError, emulate
from diloco_jax.models.build import build
from diloco_jax.observability.tape import TapeError
from diloco_jax.simulation import laboratory
from diloco_jax.simulation.replay import replay
from diloco_jax.simulation.replay.recording import Recording, read_recording
from diloco_jax.weights.first import first_pieces


def by_use(text: str, **settings) -> Config:
    config = make_config(text, weights_by_use="rows", **settings)
    return config.replace("model.tied_embeddings", False)


@pytest.fixture(scope="module", params=["keep", "overwrite"])
def recording(request, text, tmp_path_factory) -> Recording:
    config = by_use(text, quorum=1, grace=0.0, adopt=request.param, steps=60)
    config = config.replace("islands.b.step_seconds", 2.5)
    config = with_placement(config, faults=FAULTS, merge_route="xla")
    workdir = tmp_path_factory.mktemp(request.param)
    record(config, OPTIONS, workdir, unfit=4)
    return read_recording(workdir)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(replay, "Worker", Here)


def test_replay_counts_again_and_merges_with_the_same_bits(recording):
    parts = [part for m in recording.merges for part in m.made.contributions]
    taped = [r for life in recording.lives.values() for _, r in life.records]
    assert {"reopened", "reset"} & {record.kind for record in taped}
    with replay.Replay(recording) as repeated:
        table = [
            fragment
            for fragment, pieces in enumerate(repeated._store.plan.fragments)
            if any(piece.by_use for piece in pieces)
        ]
        for merge, found in repeated.merges():
            assert found.publish == merge.made.digest, merge
            has = {bool(part.uses) for part in merge.made.contributions}
            assert has == {merge.made.fragment in table}
    assert len({part.uses for part in parts}) > 10


def test_counts_that_are_not_those_of_the_tape_are_named(recording):
    merges = list(recording.merges)
    number = next(n for n, m in enumerate(merges) if m.made.contributions[0].uses)
    made = merges[number].made
    first = replace(made.contributions[0], uses="feed")
    parts = (first, *made.contributions[1:])
    merges[number] = merges[number]._replace(made=replace(made, contributions=parts))
    changed = dataclasses.replace(recording, merges=tuple(merges))
    line, who = merges[number].line, first.island
    named = rf"line {line}: the delta of {who} has counts of use of digest 'feed'"
    with (
        replay.Replay(changed) as repeated,
        contextlib.suppress(StopIteration),
        pytest.raises(TapeError, match=named),
    ):
        for _ in repeated.merges():
            pass


def test_a_row_that_no_text_has_keeps_its_first_bits(text) -> None:
    """Decay moves it on every island, and each drops that with its adoption."""
    config = by_use(text, steps=24)
    found = emulate(config)
    check_books(found)
    run = config.run
    assert run.inner.weight_decay > 0
    first = first_pieces(run, build(run))
    read = b"".join(path.read_bytes() for path in Path(text).iterdir())
    used = np.bincount(np.frombuffer(read, np.uint8), minlength=256) > 0
    used[0] = True  # Between two files.
    before, after = first["embedding"][:256], found.params["embedding"][:256]
    assert not used.all()
    np.testing.assert_array_equal(after[~used], before[~used])
    assert (after[used] != before[used]).any(axis=1).mean() > 0.9
    plain = emulate(config.replace("sync.weights_by_use", "none"))
    moved = plain.params["embedding"][:256] != before
    assert moved[~used].any(axis=1).all()


def test_a_tied_table_keeps_the_islands_tokens(text) -> None:
    config = make_config(text, steps=8).replace("model.tied_embeddings", True)
    on = config.replace("sync.weights_by_use", "rows")
    np.testing.assert_array_equal(
        emulate(on).params["embedding"], emulate(config).params["embedding"]
    )


def test_a_laboratory_has_no_counts(text) -> None:
    config = by_use(text).replace("islands.b.batch_size", 4)
    with pytest.raises(ConfigError, match=r"weights_by_use = .rows., and a laboratory"):
        laboratory.run(config)
