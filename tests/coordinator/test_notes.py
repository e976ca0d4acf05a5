"""Notes of earlier coordinators on tapes are read as they were."""

import json

import pytest

from diloco_jax.coordinator import journal
from diloco_jax.protocol import records

HERE = {"environment": {"jax": "0.9"}}
MADE_OF = {"fingerprint": "f1", "plan": "p1"}
LINES = {
    journal.Begun: {
        "kind": "begun",
        "run_id": "r",
        **MADE_OF,
        "total_tokens": 1000,
        **HERE,
    },
    journal.Recovered: {
        "kind": "recovered",
        "snapshot": 2,
        "snapshot_versions": [[1, 3], [1, 4]],
        "discarded": 1,
        "records": 12,
        "versions": [[1, 20], [1, 22]],
        "parameters_digest": "feed",
        **HERE,
    },
    journal.Term: {
        "kind": "term",
        "term": 2,
        "name": "n",
        "run_id": "r",
        "versions": [[2, 0], [2, 0]],
        "from": ["a", "b"],
        "replaced": [[1, 20], [1, 22]],
        "tokens": 800,
        "next_position": 64,
        **MADE_OF,
        "parameters_digest": "feed",
        **HERE,
    },
    journal.Measured: {
        "kind": "measured",
        "fragment": 1,
        "version": [1, 3],
        "pairwise_cosine": 0.25,
        "length_ratio": 0.9,
        "step_ratio": 0.5,
        "directions": [0.5, -0.25, None],
    },
    journal.Digested: {
        "kind": "digested",
        "fragment": 1,
        "version": [1, 3],
        "digest": "feed",
    },
    journal.Hello: {
        "kind": "hello",
        "island": "a",
        "incarnation": 2,
        "config": {"batch_size": 4},
        **HERE,
        "peer": "ipv4:10.0.0.2:4000",
    },
    journal.Compiled: {"kind": "compiled"},
    journal.Alert: {"kind": "alert", "text": "slow"},
}


def test_every_kind_is_here():
    assert set(LINES) == set(journal.Note.__args__)


def test_no_kind_is_one_of_the_policys():
    theirs = {*records.Durable.__args__, *records.Noted.__args__}
    kinds = [kind.__struct_config__.tag for kind in (*theirs, *LINES)]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(("kind", "line"), LINES.items(), ids=lambda x: str(x)[:20])
def test_the_tape_reads_back(kind, line):
    dated = journal.dated(records.from_tape({**line, "time": 1.5}, kind))
    assert dated.pop("time") > 1.5
    assert json.loads(json.dumps(dated)) == line
