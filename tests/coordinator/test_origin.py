"""A coordinator that comes back: what the log has must be of this version."""

from __future__ import annotations

import dataclasses
import mmap
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from coordinator_support import make_holder
from engine_support import as_bytes
from etils import epath
from msgspec.structs import replace

from diloco_jax import checkpoint, files
from diloco_jax.config import (
    Config,
    ConfigError,
    IslandConfig,
    OuterConfig,
    Placement,
    RunConfig,
)
from diloco_jax.config.resolving import LONG
from diloco_jax.coordinator import origin
from diloco_jax.coordinator.holding.fragment_snapshots import Publishes, make_store
from diloco_jax.coordinator.journal import DurableError, RecordLog
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.snapshots import (
    StateSnapshots,
    fragment_path,
    state_path,
    versions,
)
from diloco_jax.coordinator.snapshots import states as numbers
from diloco_jax.observability.tape import Tape, newest_first, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.search import Aim
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.holding import FragmentsRestored, RestoreFragments
from diloco_jax.protocol.messages import Contribution, Version

JOINED = records.Joined(
    island="a", incarnation=3, session="s", tokens_per_step=8, sequences_per_step=2
)


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path / "snapshots")


@pytest.fixture
def publishes(tmp_path):
    return Publishes(tmp_path / "publishes")


@pytest.fixture
def recover(run, store, folder, tmp_path):
    """Recovers from snapshots and these records in the log after them. torn: a second
    snapshot of the state comes after them, which does not read. forgotten: the records
    are gone then. saved: arrays of fragment 0 by version, as they are snapshotted; the
    newest of these does not read."""
    config = Config(run=run, islands={"a": IslandConfig(batch_size=2)})
    policy = policy_config(run, Placement(), "r", store.plan.sizes)

    def recovered(*lines, torn=False, forgotten=False, saved=None):
        whose = checkpoint.whose(run, "r", store.plan)
        states = StateSnapshots(folder, Placement(), policy, whose)
        found = make_store(config, store.plan)
        holder = make_holder(found, tmp_path, whose=whose)
        snapshots = holder._snapshots
        for fragment in range(len(store.plan.fragments)):
            snapshots.save_first(fragment, Version(), store.arrays(fragment))
        states.save(0, initial(policy))
        log = RecordLog(tmp_path / "log", after=0)
        for line in lines:
            log.append(line)
        for version, arrays in (saved or {}).items():
            snapshots.save(0, version, arrays)
        if saved:
            fragment_path(folder, 0, max(saved)).write_bytes(b"")
        if torn:
            number = log.rotate()
            states.save(number, initial(policy))
            state_path(folder, number).write_bytes(b"")
            if forgotten:
                log.forget(number)
        log.close()
        tape = Tape(tmp_path / "tape.jsonl")
        try:
            own = origin.recover(policy, states, tmp_path / "log")
            asked = as_bytes(own.restore, RestoreFragments)
            answer = as_bytes(holder.restore(asked, whole=True), FragmentsRestored)
            origin.tell_recovered(config, own, answer, tape)
            return found, own.state, own.snapshot
        finally:
            holder.close()
            tape.close()

    return recovered


PART = Contribution(
    island="a", incarnation=3, tick=1, start=0, end=1, tokens=8, base=Version()
)


@pytest.fixture
def merge(store, publishes):
    """Merges fragment 0 into its next version, and writes the publish; returns the
    record that commits the merge."""

    def merged(number, *, final=False):
        version = Version(1, number)
        delta = np.zeros(store.layouts_up[0].total_bytes, np.uint8)
        found = store.merge(0, [PART], [delta], final=final)
        prepared = publishes.write(0, version, found.payload, final=final)
        part = replace(PART, tick=number, start=number - 1, end=number)
        record = records.Merged(
            fragment=0,
            version=version,
            tick=number,
            final=final,
            contributions=(part,),
            share=1.0,
            verdicts={},
            digest=prepared.digest,
            payload_bytes=prepared.payload_bytes,
        )
        store.commit(0, version, found)
        return records.line(record)

    return merged


def test_what_the_log_has_is_the_state_and_comes_onto_the_tape(
    recover, store, tmp_path
):
    found, state, snapshot = recover(records.line(JOINED))
    assert snapshot == 0
    assert (state.islands["a"].incarnation, state.islands["a"].status) == (3, "absent")
    assert found.digest() == store.digest()
    kinds = [line["kind"] for line in read_tape(tmp_path / "tape.jsonl")]
    assert kinds == ["joined", "recovered", "restored", "restored"]


@pytest.mark.parametrize(
    "run",
    [
        RunConfig(
            outer=OuterConfig(optimizer=optimizer, learning_rate=0.7, momentum=0.9),
            sync=dataclasses.replace(LONG, fragments=2),
        )
        for optimizer in ("nesterov", "adam")
    ],
    ids=lambda run: run.outer.optimizer,
)
def test_a_recovery_says_if_momentum_is_left_as_it_was(
    recover, run, merge, tmp_path, caplog
):
    recover(records.line(JOINED), merge(1))
    *_, zero, one = read_tape(tmp_path / "tape.jsonl")
    untouched = run.outer.optimizer == "adam"
    assert zero.get("momentum_untouched", False) == untouched
    assert not one.get("momentum_untouched", False), "no publish came after it"
    said = [r for r in caplog.records if "momentum of the outer" in r.message]
    assert len(said) == untouched


def test_a_snapshot_torn_by_a_power_cut_is_passed_over_while_the_log_goes_back(
    recover, store, folder, caplog
):
    found, state, snapshot = recover(records.line(JOINED), torn=True)
    assert snapshot == 0
    assert state.islands["a"].incarnation == 3
    assert found.digest() == store.digest()
    (warning,) = (r.message for r in caplog.records if "state-000001" in r.message)
    assert warning.endswith(
        "; going on from snapshot 0, after which the log is complete"
    )
    assert numbers(folder) == [0], "what does not read must not count as kept"


def test_a_damaged_snapshot_that_the_log_was_cut_off_for_is_refused(recover):
    with pytest.raises(ConfigError, match=r"state-000001.* the record log does not go"):
        recover(records.line(JOINED), torn=True, forgotten=True)


def test_what_is_known_of_lost_fragments_is_read_from_the_end(tmp_path, monkeypatch):
    """Islands hold their anchors for minutes; a tape of weeks takes longer."""
    tape = Tape(tmp_path / "tape.jsonl")
    for number in range(1, 60):
        line = {"fragment": 0, "version": [1, number]}
        tape.append({**line, "kind": "merged"})
        if number != 58:
            tape.append({**line, "kind": "digested", "anchor": f"of {number}"})
    known = [SimpleNamespace(version=Version(1, n)) for n in (57, 58, 59)]
    fragment = SimpleNamespace(newest=known)
    read = []
    monkeypatch.setattr(
        origin,
        "newest_first",
        lambda path: (read.append(line) or line for line in newest_first(path)),
    )
    state = SimpleNamespace(fragments=[fragment], term=1, term_name="t", admitted=())
    aim = Aim(lost=(), names=frozenset("a"))
    found = origin.aim_of_lost(aim, state, [0], tape)
    assert found.known == {
        0: {Version(1, 57): "of 57", Version(1, 58): "", Version(1, 59): "of 59"}
    }
    assert len(read) < 6
    tape.close()


def test_a_fragment_goes_on_from_its_newest_snapshot_that_reads(
    recover, merge, store, folder, tmp_path
):
    lines, saved = [records.line(JOINED), merge(1)], {}
    for number in (2, 3):
        lines.append(merge(number))
        saved[Version(1, number)] = store.arrays(0)
    found, state, _ = recover(*lines, saved=saved)
    *_, zero, one = read_tape(tmp_path / "tape.jsonl")
    assert [zero["snapshot"], one["snapshot"]] == [[1, 2], [1, 0]]
    assert zero["digest"] == found.digest_of(0)
    assert state.fragments[0].version == Version(1, 3)
    anchors = zip(found.arrays(0)["anchor"], store.arrays(0)["anchor"], strict=True)
    assert all(np.array_equal(ours, theirs) for ours, theirs in anchors)
    assert versions(folder, 0) == [Version(1, 2)]


def test_a_merge_that_was_prepared_and_never_committed_never_was(
    recover, merge, publishes, tmp_path
):
    lines = [records.line(JOINED), merge(1)]
    merge(2)
    _, state, _ = recover(*lines)
    assert state.fragments[0].version == Version(1, 1)
    assert publishes.versions(0) == [Version(1, 1)]
    (recovered,) = (
        r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] == "recovered"
    )
    assert recovered["discarded"] == 1


def test_a_record_without_its_publish_is_damage(recover, merge, tmp_path):
    lines = [records.line(JOINED), merge(1)]
    (path,) = (tmp_path / "publishes").rglob("*.publish")
    path.unlink()
    with pytest.raises(DurableError, match=r"fragment 0, version \(1, 1\)"):
        recover(*lines)


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "other"},
        {"kind": "joined", "island": "a"},
        {"kind": "ticks", "through": 1, "of": "another version"},
    ],
    ids=str,
)
def test_a_record_of_another_version_is_named(recover, line):
    with pytest.raises(
        DurableError, match=f"'{line['kind']}'.* go on with the version"
    ):
        recover(line)


def test_a_restart_reads_its_state_once(recover, merge, store, folder, monkeypatch):
    """Each newest snapshot and each publish after it, and nothing else."""
    read: Counter[str] = Counter()
    read_into = files._read_into

    def counted(file, block):
        read[str(file.name)] += len(block)
        return read_into(file, block)

    monkeypatch.setattr(files, "_read_into", counted)
    recover(records.line(JOINED), *(merge(number) for number in (1, 2)))
    snapshots = {
        str(fragment_path(folder, fragment, Version())): sum(
            np.asarray(array).nbytes
            for arrays in store.arrays(fragment).values()
            for array in arrays
        )
        for fragment in range(len(store.plan.fragments))
    }
    publishes = {name: n for name, n in read.items() if name.endswith(".publish")}
    assert read == snapshots | publishes
    payload = store._merges[0].layout_down.total_bytes
    assert sorted(publishes.values()) == [payload, payload]


def test_publishes_that_a_restart_has_read_are_not_kept_in_memory(
    recover, merge, store
):
    """They lie where they are on the disk, and serve all the same."""
    lines = [merge(number) for number in (1, 2, 3)]
    found, _, _ = recover(records.line(JOINED), *lines)
    kept = found._fragments[0].publishes
    assert [type(payload.obj) for _, payload in kept] == [mmap.mmap] * 3
    for have, count in ((Version(1, 0), 3), (Version(1, 1), 2), (Version(1, 2), 1)):
        sources = [s.fetch(0, Version(1, 3), have) for s in (found, store)]
        assert [source.count for source in sources] == [count, count]
        served, wanted = (
            b"".join(bytes(buffer) for buffer in source.buffers) for source in sources
        )
        assert served == wanted
