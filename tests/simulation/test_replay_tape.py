"""Whatever was done to a tape, its first wrong line is named."""

import copy
import dataclasses
import json
from importlib import metadata

import pytest

from diloco_jax.config import Config, ConfigError, IslandConfig, RunConfig
from diloco_jax.loading import write_config_json
from diloco_jax.observability.tape import Tape, TapeError
from diloco_jax.policy import records
from diloco_jax.policy.values import Contribution, Version
from diloco_jax.simulation.replay.recording import SAME_BITS, Who
from diloco_jax.simulation.replay.tape import read_recording

CONFIG = Config(run=RunConfig(), islands={"a": IslandConfig(batch_size=2)})
ENVIRONMENT = {
    **dict.fromkeys((*SAME_BITS, "xla_flags"), ""),
    "diloco_jax": metadata.version("diloco-jax"),
    "threads": 2,
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
    )
    return json.loads(json.dumps(records.line(merge)))


TAPE = [
    {
        "kind": "begun",
        "run_id": "r",
        "fingerprint": CONFIG.run.fingerprint(),
        "plan": "two fragments",
        "environment": ENVIRONMENT,
    },
    *life(1),
    of_island(1, "adopted", 0, fragment=0),
    of_island(2, "adopted", 0, fragment=1),
    of_island(3, "granted", 0, stop=100),
    of_island(4, "took", 4, fragment=0, tick=1),
    merged(0, 1, 0, 4, tick=1),
    of_island(5, "adopted", 5, fragment=0, version=[1, 1]),
    of_island(6, "took", 8, fragment=1, tick=2),
    merged(1, 1, 0, 8, tick=2),
    {
        "kind": "recovered",
        "snapshot": 1,
        "records": 1,
        "parameters_digest": "feed",
        "versions": [[1, 1], [1, 1]],
        "snapshot_merges": 1,
        "environment": ENVIRONMENT,
    },
    of_island(6, "took", 8, fragment=1, tick=2),
    *life(2),
    of_island(1, "adopted", 0, incarnation=2, fragment=0, version=[1, 1]),
    of_island(2, "adopted", 0, incarnation=2, fragment=1, version=[1, 1]),
    of_island(3, "took", 4, incarnation=2, fragment=0, tick=3, version=[1, 1]),
    merged(0, 2, 0, 4, tick=3, incarnation=2, base=1),
    of_island(4, "took", 5, incarnation=2, fragment=1, tick=4, version=[1, 1]),
    {"kind": "finished"},
]
FIRST_MERGE, LAST_MERGE, RECOVERED, REPEATED = 7, 18, 11, 12


@pytest.fixture
def workdir(tmp_path):
    write_config_json(CONFIG, tmp_path / "config.json")
    return tmp_path


def write(workdir, records=TAPE):
    path = workdir / "tape.jsonl"
    path.unlink(missing_ok=True)
    tape = Tape(path)
    for record in records:
        tape.append(record)
    tape.close()
    return path


def test_all_that_replay_needs_is_read(workdir):
    write(workdir)
    recording = read_recording(workdir)
    assert [(m.number, m.fragment, m.version, m.digest) for m in recording.merges] == [
        (1, 0, Version(1, 1), "0.1"),
        (2, 1, Version(1, 1), "1.1"),
        (3, 0, Version(1, 2), "0.2"),
    ]
    assert [(r.snapshot_merges, r.merges) for r in recording.recoveries] == [(1, 2)]
    lives = recording.lives
    assert lives[Who("a", 1)].begins() == [Version(1, 0)] * 2
    assert lives[Who("a", 2)].begins() == [Version(1, 1)] * 2
    assert lives[Who("a", 1)].config == CONFIG.islands["a"]
    # Records once, and none after the last take that is merged.
    assert [w.record.seq for w in lives[Who("a", 1)].records] == [1, 2, 3, 4, 5, 6]
    assert [w.record.seq for w in lives[Who("a", 2)].records] == [1, 2, 3]


def test_until_needs_no_more_than_its_merges(workdir):
    write(workdir, TAPE[:-1])
    recording = read_recording(workdir, until=1)
    assert (len(recording.merges), recording.merges_on_tape) == (1, 3)
    assert (recording.recoveries, list(recording.lives)) == ((), [Who("a", 1)])
    assert len(recording.lives[Who("a", 1)].records) == 4
    assert len(read_recording(workdir, until=3).recoveries) == 1


@pytest.mark.parametrize("until", [0, 4])
def test_a_merge_that_is_not_there_cannot_be_the_last(workdir, until):
    write(workdir)
    with pytest.raises(ConfigError, match=f"until {until}.*1 to 3"):
        read_recording(workdir, until=until)


@pytest.mark.parametrize("until", [None, 0, 1])
def test_a_tape_without_a_merge_has_nothing_to_repeat(workdir, until):
    write(workdir, TAPE[:1])
    with pytest.raises(ConfigError) as caught:
        read_recording(workdir, until=until)
    assert "ends after line 1 without a merge" in str(caught.value)
    assert "--until" not in str(caught.value)


# ---- lines changed, with the chain as it was ---------------------------------------


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        (lambda lines: lines[:9] + lines[10:], "line 10:.*missing"),
        (lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]], "line 5:.*order"),
        (
            lambda lines: [*lines[:6], lines[6].replace(b'p":4', b'p":5'), *lines[7:]],
            "line 8:.*line 7 was altered",
        ),
        (lambda lines: [*lines[:6], lines[6][:30] + b"\n"], "line 7: not a record"),
        (lambda lines: lines[:-1], "after line 20 .*'finished'.*--until 3"),
        (lambda lines: [*lines[:-1], lines[-1][:9]], "after line 20 .*'finished'"),
    ],
    ids=["missing", "reordered", "altered", "truncated", "ends early", "torn end"],
)
def test_a_changed_line_is_named(workdir, change, bad):
    path = write(workdir)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(TapeError, match=bad):
        read_recording(workdir)


# ---- a new chain over changed lines ------------------------------------------------


def without(*numbers):
    """The tape without these lines, counted from 0."""
    return [record for n, record in enumerate(TAPE) if n not in numbers]


def swapped(one, other):
    tape = list(TAPE)
    tape[one], tape[other] = tape[other], tape[one]
    return tape


def altered(number, change):
    tape = copy.deepcopy(TAPE)
    change(tape[number])
    return tape


@pytest.mark.parametrize(
    ("tape", "bad"),
    [
        (without(0), "line 1: 'hello'"),
        ([*TAPE, TAPE[0]], "line 22: 'begun'"),
        (without(1), "line 2:.*joined without"),
        (without(2), "line 3: island a, incarnation 1 has not joined"),
        ([*TAPE[:3], TAPE[2], *TAPE[3:]], "line 4:.*second time"),
        (without(5), "line 6: record 4 .* follows number 2"),
        (without(6), "line 8: record 5 .* follows number 3"),
        (without(17, 19), "line 18:.*fragment 0 at tick 3.*on no line"),
        (without(FIRST_MERGE), r"line 8:.*\(1, 1\) of fragment 0, .* \(1, 0\)"),
        (without(10), r"line 11:.*came back with version \(1, 1\) of fragment 1"),
        (without(8), "line 9: record 6 .* follows number 4"),
        (swapped(FIRST_MERGE, LAST_MERGE), r"line 8:.*\(1, 2\) after \(1, 0\)"),
        (
            altered(FIRST_MERGE, lambda r: r["contributions"][0].update(incarnation=2)),
            "line 8: island a, incarnation 2 has not joined",
        ),
        (swapped(FIRST_MERGE, 10), "line 9: record 5"),
        (altered(6, lambda r: r["record"].update(seq=6)), "line 7: record 6.*3"),
        (altered(8, lambda r: r["record"].update(step=3)), "line 9:.*step 3.*step 4"),
        (altered(REPEATED, lambda r: r["record"].update(step=9)), "line 13:.*line 10"),
        (altered(6, lambda r: r["record"].update(step=5)), "line 8:.*4.*line 7"),
        (altered(6, lambda r: r["record"].pop("seq")), "line 7: not a record 'island'"),
        (altered(FIRST_MERGE, lambda r: r.update(version=[1, 2])), "line 8:.*missing"),
        (altered(FIRST_MERGE, lambda r: r.pop("digest")), "line 8:.*digest"),
        (altered(FIRST_MERGE, lambda r: r.update(share="1")), "line 8:.*float"),
        (altered(FIRST_MERGE, lambda r: r.update(share=2.0)), "line 8:.*share 2.0"),
        (
            altered(FIRST_MERGE, lambda r: r["contributions"][0].update(tokens=0)),
            r"line 8:.*deltas of \[0\] tokens",
        ),
        (
            altered(FIRST_MERGE, lambda r: r["contributions"].clear()),
            "line 8: a merge of fragment 0 without a delta",
        ),
        (altered(0, lambda r: r["environment"].pop("threads")), "line 1:.*threads"),
        (altered(1, lambda r: r.update(environment={})), "line 3:.*'diloco_jax'"),
        (altered(RECOVERED, lambda r: r.update(snapshot_merges=3)), "line 12:.*3"),
        (
            [*TAPE[:-1], merged(1, 2, 0, 8, tick=2), TAPE[-1]],
            "line 21:.*line 11 already",
        ),
    ],
)
def test_a_contradiction_is_named(workdir, tape, bad):
    write(workdir, tape)
    with pytest.raises(TapeError, match=bad):
        read_recording(workdir)


# ---- the wrong workdir --------------------------------------------------------------


def test_a_workdir_of_another_version_is_refused(workdir):
    write(workdir, altered(0, lambda r: r["environment"].update(diloco_jax="0.0.9")))
    with pytest.raises(ConfigError, match=r"diloco_jax 0\.0\.9, this is"):
        read_recording(workdir)


def test_a_config_of_another_run_is_refused(workdir):
    write(workdir)
    other = dataclasses.replace(CONFIG, run=RunConfig(seed=1))
    write_config_json(other, workdir / "config.json")
    prints = f"{CONFIG.run.fingerprint()}.*{other.run.fingerprint()}"
    with pytest.raises(ConfigError, match=prints):
        read_recording(workdir)


def test_a_config_with_unknown_fields_is_refused(workdir):
    write(workdir)
    fields = json.loads((workdir / "config.json").read_text())
    fields["run"]["sync"]["quorums"] = 1
    (workdir / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"quorums.*quorum"):
        read_recording(workdir)


def test_a_tape_of_a_later_term_is_refused(workdir):
    term = {"kind": "term", "term": 2, "run_id": "r"}
    write(workdir, [term, *TAPE[1:]])
    with pytest.raises(ConfigError, match=r"is of term 2 of run r, .* lost its state"):
        read_recording(workdir)


def test_a_folder_without_a_run_is_refused(workdir):
    with pytest.raises(ConfigError, match=r"no tape\.jsonl"):
        read_recording(workdir)


def restored(start, value):
    """The second incarnation begins with moments of another; nothing of that one is
    merged."""
    return [
        *TAPE[:7],
        of_island(5, "took", 9, fragment=1, tick=2),
        *life(2),
        of_island(1, "adopted", 0, incarnation=2, fragment=0),
        of_island(2, "adopted", 0, incarnation=2, fragment=1),
        of_island(3, "restored", 0, incarnation=2, start=start, value=value),
        of_island(4, "restored", 0, incarnation=2, fragment=1, start=1, value=value),
        of_island(5, "took", 3, incarnation=2, fragment=0, tick=3),
        merged(0, 1, 0, 3, tick=3, incarnation=2),
        {"kind": "finished"},
    ]


def test_an_incarnation_whose_moments_are_needed_is_kept_so_far(workdir):
    write(workdir, restored(start=1, value=6))
    lives = read_recording(workdir).lives
    assert lives[Who("a", 2)].restored() == (Who("a", 1), 6, (1,))
    assert lives[Who("a", 1)].saves == {6}
    assert [w.record.seq for w in lives[Who("a", 1)].records] == [1, 2, 3, 4]


@pytest.mark.parametrize("start", [2, 7])
def test_moments_of_nobody_are_named(workdir, start):
    write(workdir, restored(start=start, value=6))
    with pytest.raises(TapeError, match=f"line 11: .*incarnation {start}, which was"):
        read_recording(workdir)
