"""A tape as a run writes it, and the same with lines changed."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib import metadata

from diloco_jax.config import Config, IslandConfig, RunConfig
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.messages import Contribution, Version
from diloco_jax.simulation.replay.recording import SAME_BITS, VERSIONS

CONFIG = Config(run=RunConfig(), islands={"a": IslandConfig(batch_size=2)})
ENVIRONMENT = {
    **dict.fromkeys((*SAME_BITS, "xla_flags"), ""),
    **{package: metadata.version(package) for package in VERSIONS},
    "threads": 2,
    "devices": 1,
    "processes": 1,
}


def of_island(seq, kind, step, incarnation=1, **fields):
    record = {"seq": seq, "kind": kind, "step": step, "fragment": -1, "tick": -1}
    record |= {"version": [1, 0], "start": 0, "stop": 0, "value": 0, **fields}
    who = {"island": "a", "incarnation": incarnation}
    return {"kind": "island", **who, "record": record}


def life(incarnation):
    """Hello, and the two records with which an incarnation begins."""
    who = {"island": "a", "incarnation": incarnation}
    config = dataclasses.asdict(CONFIG.islands["a"])
    hello = {**who, "config": config, "environment": ENVIRONMENT, "peer": "h"}
    joined = records.Joined(**who, session="s", tokens_per_step=1, sequences_per_step=1)
    return [{"kind": "hello", **hello}, records.line(joined)]


def merged(fragment, number, start, end, tick, incarnation=1, base=0):
    part = Contribution(
        island="a",
        incarnation=incarnation,
        tick=tick,
        start=start,
        end=end,
        tokens=end - start,
        base=Version(1, base),
    )
    merge = records.Merged(
        fragment=fragment,
        version=Version(1, number),
        tick=tick,
        final=False,
        contributions=(part,),
        share=1.0,
        verdicts={"a": (tick, "merged", "")},
        digest=f"{fragment}.{number}",
        payload_bytes=3,
    )
    return json.loads(json.dumps(records.line(merge)))


def restored(fragment, snapshot, version=1):
    about = {"fragment": fragment, "version": [1, version], "digest": "feed"}
    return {"kind": "restored", **about, "snapshot": [1, snapshot]}


TAPE = [
    {
        "kind": "begun",
        "run_id": "r",
        "fingerprint": CONFIG.run.fingerprint(),
        "plan": "two fragments",
        "total_tokens": CONFIG.run.total_tokens,
        "environment": ENVIRONMENT,
    },
    *life(1),
    of_island(1, "adopted", 0, fragment=0),
    of_island(2, "adopted", 0, fragment=1),
    of_island(3, "progress", 0, value=100),
    of_island(4, "took", 4, fragment=0, tick=1),
    merged(0, 1, 0, 4, tick=1),
    of_island(5, "adopted", 5, fragment=0, version=[1, 1]),
    of_island(6, "took", 8, fragment=1, tick=2),
    merged(1, 1, 0, 8, tick=2),
    {
        "kind": "recovered",
        "snapshot": 1,
        "records": 1,
        "versions": [[1, 1], [1, 1]],
        "discarded": 0,
        "environment": ENVIRONMENT,
    },
    restored(0, 1),
    restored(1, 0),
    of_island(6, "took", 8, fragment=1, tick=2),
    *life(2),
    of_island(1, "adopted", 0, incarnation=2, fragment=0, version=[1, 1]),
    of_island(2, "adopted", 0, incarnation=2, fragment=1, version=[1, 1]),
    of_island(3, "took", 4, incarnation=2, fragment=0, tick=3, version=[1, 1]),
    merged(0, 2, 0, 4, tick=3, incarnation=2, base=1),
    of_island(4, "took", 5, incarnation=2, fragment=1, tick=4, version=[1, 1]),
    {"kind": "finished"},
]
FIRST_MERGE, RECOVERED = 7, 11
"""Places of these lines in `TAPE`."""


def write(workdir, records=TAPE):
    path = workdir / "tape.jsonl"
    path.unlink(missing_ok=True)
    tape = Tape(path)
    for record in records:
        tape.append(record)
    tape.close()
    return path


def without(*numbers):
    """The tape without these lines, counted from 0."""
    return [record for n, record in enumerate(TAPE) if n not in numbers]


def altered(number, change):
    tape = list(TAPE)
    # Alone: lines of the tape share parts, and so would their copies.
    tape[number] = copy.deepcopy(tape[number])
    change(tape[number])
    return tape
