"""What a new chain of hashes over changed lines cannot hide."""

from __future__ import annotations

import copy
import json

import pytest
from written_tape import (
    CONFIG,
    FIRST_MERGE,
    LAST_MERGE,
    RECOVERED,
    REPEATED,
    TAPE,
    altered,
    merged,
    of_island,
    swapped,
    without,
    write,
)

from diloco_jax.config import ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.observability.tape import TapeError
from diloco_jax.protocol import records
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.replay.tape import read_recording


@pytest.fixture
def workdir(tmp_path):
    write_config_json(CONFIG, tmp_path / "config.json")
    return tmp_path


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


def granting(*spans, told=((0, 100), (100, 160))):
    """The tape with these grants to the first incarnation, and what it notes of it."""
    grants, offset = [], 0
    for start, stop in spans:
        who = {"island": "a", "incarnation": 1}
        grant = records.Granted(**who, start=start, stop=stop, offset=offset)
        grants.append(records.line(grant))
        offset += stop - start
    noted = [
        of_island(seq, "granted", 0, start=start, stop=stop)
        for seq, (start, stop) in enumerate(told, start=3)
    ]
    # Its later records have other numbers then.
    later = copy.deepcopy(TAPE[6:])
    for record in later:
        if record["kind"] == "island" and record["incarnation"] == 1:
            record["record"]["seq"] += len(noted) - 1
    return [*TAPE[:5], *grants, *noted, *later]


def test_what_an_island_was_granted_is_on_the_tape_before(workdir):
    write(workdir, granting((0, 100), (100, 160)))
    assert len(read_recording(workdir).merges) == 3
    write(workdir, granting((0, 100)))
    with pytest.raises(TapeError, match=r"line 8: record 4 .*\[100, 160\).*no line"):
        read_recording(workdir)
    tape = granting((0, 100), (100, 160))
    write(workdir, [*tape[:5], *tape[6:]])
    with pytest.raises(TapeError, match=r"line 6: .*after 100 sequences, .*has 0"):
        read_recording(workdir)


def ended(*settled, line=-1, incarnation=2, **fields):
    """The tape with the end of an incarnation in this line."""
    left = records.Left(
        island="a",
        incarnation=incarnation,
        steps=9,
        reason="finished",
        said="",
        settled_steps_by_fragment=settled,
        merged_steps=0,
        lost_tokens_by_fragment=(),
        left_behind=fields.get("left_behind", ()),
    )
    line = len(TAPE) + line if line < 0 else line
    return [*TAPE[:line], json.loads(json.dumps(records.line(left))), *TAPE[line:]]


LEFT_BEHIND = records.LeftBehind(
    **{"island": "a", "incarnation": 2, "fragment": 1, "tick": 4},
    **{"start": 0, "end": 5, "tokens": 5, "base": Version(1, 1)},
)


@pytest.mark.parametrize(
    "tape",
    [
        ended(4, 0),
        ended(4, 5, left_behind=(LEFT_BEHIND,)),
        # It may have been in a merge when the coordinator died.
        [*TAPE[:10], *ended(4, 8, line=11, incarnation=1)[11:12], *TAPE[11:]],
        [
            *ended(4, 5)[:-2],
            of_island(5, "dropped", 6, 2, fragment=1, tick=4),
            *ended(4, 5)[-2:],
        ],
    ],
    ids=["open", "left behind", "before a crash", "given up"],
)
def test_what_is_settled_may_be_in_no_merge(workdir, tape):
    if tape[10]["kind"] == "left":
        tape = altered_in(tape, RECOVERED, versions=[[1, 1], [1, 0]])
        tape = [*tape[:14], *without_fragment_1(tape[14:])]
    write(workdir, tape)
    read_recording(workdir)


def altered_in(tape, number, **fields):
    tape = copy.deepcopy(tape)
    tape[number].update(fields)
    return tape


def without_fragment_1(lines):
    """As of a run that has not merged it."""
    lines = copy.deepcopy(lines)
    for line in lines:
        record = line.get("record", {})
        if record.get("fragment") == 1:
            record["version"] = [1, 0]
    return lines


def test_a_last_merge_that_is_missing_is_named(workdir):
    tape = ended(4, 5)
    write(workdir, tape)
    with pytest.raises(TapeError, match=r"line 21: .*first 5 steps .*\(line 20\)"):
        read_recording(workdir)
    assert read_recording(workdir, until=3).merges_on_tape == 3
    merge = merged(1, 2, 0, 5, tick=4, incarnation=2, base=1)
    write(workdir, [*tape[:-2], merge, *tape[-2:]])
    assert len(read_recording(workdir).merges) == 4


# ---- facts that cannot be ----------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "bad"),
    [
        ("threads", 10**9, "threads = 1000000000; it must be at least 1, at most 4,0"),
        ("threads", -3, "threads = -3; it must be at least 1"),
        ("threads", True, "threads = True"),
        ("processes", "9", "processes = '9'"),
        ("xla_flags", 7, "xla_flags = 7; it must be a text"),
    ],
)
@pytest.mark.parametrize(("number", "line"), [(0, 1), (1, 3), (RECOVERED, 12)])
def test_processes_that_cannot_be_made_are_refused(
    workdir, number, line, field, value, bad
):
    write(workdir, altered(number, lambda r: r["environment"].update({field: value})))
    with pytest.raises(TapeError, match=f"line {line}: .*{bad}"):
        read_recording(workdir)


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        ({"batch_size": 0}, r"islands\.a\.batch_size = 0; it must be at least 1"),
        ({"mesh_data": 3}, "batch_size = 2 is not divided by"),
        ({"batch_size": "x"}, "not a record 'joined'"),
        ({"hosts": 2, "mesh_data": 2}, "hosts = 2, but from a world of 1 processes"),
    ],
)
def test_an_island_that_cannot_be_is_refused(workdir, fields, bad):
    write(workdir, altered(1, lambda r: r["config"].update(fields)))
    with pytest.raises(TapeError, match=f"line 3: .*{bad}"):
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
