"""Whatever was done to a tape, its first wrong line is named."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib import metadata

import pytest

from diloco_jax.config import Config, ConfigError, IslandConfig, RunConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.journal import Recovered
from diloco_jax.observability.tape import Tape, TapeError
from diloco_jax.protocol import records
from diloco_jax.protocol.messages import Contribution, Version
from diloco_jax.simulation.replay.recording import (
    SAME_BITS,
    VERSIONS,
    Who,
    read_recording,
)

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


DIGESTED = {"kind": "digested", "fragment": 0, "version": [1, 1], "digest": "theta"}


@pytest.fixture
def workdir(tmp_path):
    write_config_json(CONFIG, tmp_path / "config.json")
    return tmp_path


def test_all_that_replay_needs_is_read(workdir):
    write(workdir)
    recording = read_recording(workdir)
    assert [
        (m.number, m.made.fragment, m.made.version, m.made.digest)
        for m in recording.merges
    ] == [
        (1, 0, Version(1, 1), "0.1"),
        (2, 1, Version(1, 1), "1.1"),
        (3, 0, Version(1, 2), "0.2"),
    ]
    back, *fragments = recording.between
    assert (back.merges, type(back.record)) == (2, Recovered)
    assert [(f.merges, f.record.snapshot) for f in fragments] == [
        (2, Version(1, 1)),
        (2, Version(1, 0)),
    ]
    assert [[m.version for m in recording.logged(f)] for f in fragments] == [
        [],
        [Version(1, 1)],
    ]
    lives = recording.lives
    assert lives[Who("a", 1)].begins() == [Version(1, 0)] * 2
    assert lives[Who("a", 2)].begins() == [Version(1, 1)] * 2
    assert lives[Who("a", 1)].config == CONFIG.islands["a"]
    # Records once, and none after the last take that is merged.
    assert [w.record.seq for w in lives[Who("a", 1)].records] == [1, 2, 3, 4, 5, 6]
    assert [w.record.seq for w in lives[Who("a", 2)].records] == [1, 2, 3]


def test_the_digest_of_the_parameters_follows_its_merge(workdir):
    write(workdir, [*TAPE[:10], DIGESTED, *TAPE[10:]])
    first, *others = read_recording(workdir).merges
    assert (first.made.digest, first.parameters) == ("0.1", "theta")
    assert {merge.parameters for merge in others} == {""}


def test_until_needs_no_more_than_its_merges(workdir):
    write(workdir, TAPE[:-1])
    recording = read_recording(workdir, until=1)
    assert (len(recording.merges), recording.merges_on_tape) == (1, 3)
    assert (recording.between, list(recording.lives)) == ((), [Who("a", 1)])
    assert len(recording.lives[Who("a", 1)].records) == 4
    assert len(read_recording(workdir, until=3).between) == 3


def test_each_incarnation_has_the_tokens_of_its_time(workdir):
    """The run was over before its coordinator came back, and was extended."""
    total = CONFIG.run.total_tokens
    run = dataclasses.replace(CONFIG.run, total_tokens=2 * total)
    more = dataclasses.replace(CONFIG, run=run)
    write_config_json(more, workdir / "config.json")
    end, extended = TAPE[-1], {"kind": "extended", "total_tokens": 2 * total}
    tape = [*TAPE[:RECOVERED], end, *TAPE[RECOVERED:15], extended, *TAPE[15:]]
    write(workdir, tape)
    lives = read_recording(workdir).lives
    assert lives[Who("a", 1)].total_tokens == total
    assert lives[Who("a", 2)].total_tokens == 2 * total
    write(workdir, tape[:-1])
    with pytest.raises(TapeError, match="without the end of the run"):
        read_recording(workdir)


@pytest.mark.parametrize(
    ("tape", "until", "message"),
    [
        (TAPE, 0, "--until 0.*merges 1 to 3; choose one"),
        (TAPE, 4, "--until 4.*merges 1 to 3; choose one"),
        *((TAPE[:1], until, "line 1 without a merge: .*; give") for until in (None, 1)),
    ],
)
def test_a_merge_that_is_not_there_cannot_be_repeated(workdir, tape, until, message):
    write(workdir, tape)
    with pytest.raises(ConfigError, match=message):
        read_recording(workdir, until=until)


# ---- lines changed, with the chain as it was ---------------------------------------


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        (lambda lines: lines[:9] + lines[10:], "line 10:.*missing"),
        (lambda lines: lines[:-1], "after line 22 .*'finished'.*--until 3"),
        (lambda lines: [*lines[:-1], lines[-1][:9]], "after line 22 .*'finished'"),
    ],
    ids=["missing", "ends early", "torn end"],
)
def test_a_changed_line_is_named(workdir, change, bad):
    path = write(workdir)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(TapeError, match=bad):
        read_recording(workdir)


# ---- the wrong workdir --------------------------------------------------------------


OTHER = dataclasses.replace(CONFIG, run=RunConfig(seed=1))
TERM = {"kind": "term", "term": 2, "run_id": "r"}


@pytest.mark.parametrize(
    ("tape", "config", "message"),
    [
        (
            altered(0, lambda r: r["environment"].update(diloco_jax="0.0.9")),
            CONFIG,
            r"diloco_jax 0\.0\.9, this is",
        ),
        (TAPE, OTHER, f"{CONFIG.run.fingerprint()}.*{OTHER.run.fingerprint()}"),
        ([TERM, *TAPE[1:]], CONFIG, r"is of term 2 of run r, .* lost its state"),
        (None, CONFIG, r"no tape\.jsonl"),
    ],
    ids=["another version", "another run", "a later term", "no run"],
)
def test_the_wrong_workdir_is_refused(workdir, tape, config, message):
    write_config_json(config, workdir / "config.json")
    if tape is not None:
        write(workdir, tape)
    with pytest.raises(ConfigError, match=message):
        read_recording(workdir)


def begun_with(start, value):
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
    write(workdir, begun_with(start=1, value=6))
    lives = read_recording(workdir).lives
    assert lives[Who("a", 2)].restored() == (Who("a", 1), 6, (1,), ())
    assert lives[Who("a", 1)].saves == {6}
    assert [w.record.seq for w in lives[Who("a", 1)].records] == [1, 2, 3, 4]


def unheard(seq, incarnation=1):
    """A tape whose second incarnation passes a record on, after 4 that were heard."""
    *tape, took, merge, end = begun_with(start=1, value=6)
    told = of_island(seq, "adopted", 5, fragment=0, version=[1, 1])["record"]
    told |= {"incarnation": incarnation}
    passed_on = of_island(5, "restored", 0, incarnation=2, start=1, unheard=told)
    took["record"] |= {"seq": 6}
    return [*tape[:7], *tape[8:], passed_on, took, merge, end]


@pytest.mark.parametrize(("seq", "known"), [(4, 4), (5, 5)])
def test_what_was_passed_on_follows_what_was_heard(workdir, seq, known):
    write(workdir, unheard(seq))
    lives = read_recording(workdir).lives
    found = [w.record.seq for w in lives[Who("a", 1)].records]
    assert found == list(range(1, known + 1))
    _, _, fragments, passed_on = lives[Who("a", 2)].restored()
    assert (fragments, [record["seq"] for record in passed_on]) == ((1,), [seq])


def test_what_was_passed_on_by_one_that_died_unheard_leaves_its_place(workdir):
    *tape, took, merge, end = unheard(5)
    took["record"] |= {"seq": 7}
    again = of_island(6, "restored", 0, incarnation=2, start=1, value=6)
    write(workdir, [*tape, again, took, merge, end])
    *_, passed_on = read_recording(workdir).lives[Who("a", 2)].restored()
    assert [bool(record) for record in passed_on] == [True, False]


def test_moments_of_nobody_are_named(workdir):
    write(workdir, begun_with(start=7, value=6))
    with pytest.raises(TapeError, match="incarnation 7 has not joined"):
        read_recording(workdir)


# ---- lines lost in a crash of the machine, with the chain of those that are left ----


@pytest.mark.parametrize(
    ("tape", "bad"),
    [
        (without(0), "line 1: 'hello'"),
        ([*TAPE, TAPE[0]], "line 24: 'begun'"),
        (without(1), "line 2: not a record 'joined'"),
        (without(2), "line 3: island a, incarnation 1 has not joined"),
        (without(5), "line 6: record 4 .* follows number 2"),
        (without(8), "line 9: record 6 .* follows number 4"),
        (without(19, 21), "line 20:.*fragment 0 at tick 3.*on no line"),
        (without(FIRST_MERGE), r"line 20:.*\(1, 2\) after \(1, 0\)"),
        (altered(6, lambda r: r["record"].pop("seq")), "line 7: not a record 'island'"),
        (altered(FIRST_MERGE, lambda r: r.pop("digest")), "line 8:.*digest"),
        (unheard(6), "line 14: record 6 of .* 1 follows number 4"),
        (unheard(5, incarnation=7), "line 14: island a, incarnation 7 has not joined"),
        (unheard(5, incarnation="1"), "line 14: not a record 'island'"),
        ([*TAPE[:7], DIGESTED, *TAPE[7:]], r"line 8: .*\(1, 1\), but no merge"),
        (altered(1, lambda r: r["config"].update(hosts="x")), "line 3: not a record"),
    ],
)
def test_a_gap_is_named(workdir, tape, bad):
    write(workdir, tape)
    with pytest.raises(TapeError, match=bad):
        read_recording(workdir)


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
@pytest.mark.parametrize("number", [0, 1, RECOVERED])
def test_another_jax_is_refused_before_it_is_imported(workdir, package, number):
    other = {package: "0.0.1", "xla_flags": "--xla_flag_of_another_version"}
    write(workdir, altered(number, lambda r: r["environment"].update(other)))
    with pytest.raises(ConfigError, match=f"had {package} = '0.0.1', here it is '"):
        read_recording(workdir)


def test_a_long_line_that_is_no_record_is_not_repeated(workdir):
    write(workdir, altered(3, lambda r: r["record"].update(kind="x" * 100_000)))
    with pytest.raises(TapeError, match="line 4: not a record 'island'") as caught:
        read_recording(workdir)
    assert len(str(caught.value)) < 1000
