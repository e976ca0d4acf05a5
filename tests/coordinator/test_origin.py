"""A coordinator that comes back: what the log has must be of this version."""

from pathlib import Path

import numpy as np
import pytest
from coordinator_support import arrays
from etils import epath

from diloco_jax import checkpoint
from diloco_jax.config import (
    Config,
    ConfigError,
    IslandConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.coordinator import origin
from diloco_jax.coordinator.log import DurableError, RecordLog
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.snapshots import Snapshots
from diloco_jax.core.payload import digest_payload
from diloco_jax.observability.tape import Tape, read_tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.values import Contribution, Version

JOINED = records.Joined(
    island="a", incarnation=3, session="s", tokens_per_step=8, sequences_per_step=2
)


@pytest.fixture
def recover(run, store, tmp_path):
    """Recovers from a snapshot and these records, with payloads or without, in the log
    after it. torn: a second
    snapshot comes after them, which does not read. forgotten: so are the records."""
    config = Config(run=run, islands={"a": IslandConfig(batch_size=2)})
    policy = policy_config(run, Placement(), "r", store.plan.sizes)

    def recovered(*lines, torn=False, forgotten=False):
        folder = epath.Path(tmp_path / "snapshots")
        snapshots = Snapshots(
            folder, Placement(), policy, checkpoint.whose(run, "r", store.plan)
        )
        snapshots.save(0, initial(policy), arrays(store))
        log = RecordLog(tmp_path / "log", after=0)
        for line in lines:
            log.append(*line if isinstance(line, tuple) else (line,))
        if torn:
            number = log.rotate()
            snapshots.save(number, initial(policy), arrays(store))
            for file in Path(folder / str(number)).rglob("*"):
                if file.is_file():
                    file.write_bytes(b"")
            if forgotten:
                log.forget(number)
        log.close()
        tape = Tape(tmp_path / "tape.jsonl")
        try:
            return origin.recover(
                config, policy, store.plan, snapshots, tmp_path / "log", tape
            )
        finally:
            snapshots.close()
            tape.close()

    return recovered


def test_what_the_log_has_is_the_state_and_comes_onto_the_tape(
    recover, store, tmp_path
):
    found, state, snapshot = recover(records.line(JOINED))
    assert snapshot == 0
    assert (state.islands["a"].incarnation, state.islands["a"].status) == (3, "absent")
    assert found.digest() == store.digest()
    kinds = [line["kind"] for line in read_tape(tmp_path / "tape.jsonl")]
    assert kinds == ["joined", "recovered"]


@pytest.mark.parametrize(
    "run",
    [
        RunConfig(
            outer=OuterConfig(optimizer=optimizer, learning_rate=0.7, momentum=0.9),
            sync=SyncConfig(fragments=2),
        )
        for optimizer in ("nesterov", "adam")
    ],
    ids=lambda run: run.outer.optimizer,
)
def test_a_recovery_says_if_momentum_is_left_as_it_was(
    recover, run, store, tmp_path, caplog
):
    part = Contribution(
        island="a", incarnation=3, tick=1, start=0, end=1, tokens=8, base=Version()
    )
    delta = np.zeros(store.layouts_up[0].total_bytes, np.uint8)
    merged = store.merge(0, Version(1, 1), [part], [delta], final=False)
    line = records.Merged(
        fragment=0,
        version=Version(1, 1),
        tick=1,
        final=False,
        contributions=(part,),
        share=1.0,
        verdicts={},
        digest=digest_payload(merged.payload),
    )
    recover((records.line(JOINED), b""), (records.line(line), merged.payload))
    *_, recovered = read_tape(tmp_path / "tape.jsonl")
    untouched = run.outer.optimizer == "adam"
    assert recovered.get("momentum_untouched", False) == untouched
    said = [r for r in caplog.records if "momentum of outer.optimizer" in r.message]
    assert len(said) == untouched


def test_a_snapshot_torn_by_a_power_cut_is_passed_over_while_the_log_goes_back(
    recover, store, caplog
):
    found, state, snapshot = recover(records.line(JOINED), torn=True)
    assert snapshot == 0
    assert state.islands["a"].incarnation == 3
    assert found.digest() == store.digest()
    (warning,) = (r.message for r in caplog.records if "checkpoint 1 in" in r.message)
    assert warning.endswith(
        "); going on from snapshot 0, after which the log is complete"
    )


def test_a_damaged_snapshot_that_the_log_was_cut_off_for_is_refused(recover):
    with pytest.raises(
        ConfigError, match=r"checkpoint 1 .* the record log does not go"
    ):
        recover(records.line(JOINED), torn=True, forgotten=True)


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
