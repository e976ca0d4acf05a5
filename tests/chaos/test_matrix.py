"""Real runs under `diloco chaos`: every fault in every phase, at night."""

import json

import pytest
from fault_cases import CASES, ISLANDS, PHASES
from fault_matrix import BATCH, SEQUENCE, loss_problems, phase_problems, run_cell
from phases import Phase, Recovery
from tiny import MODEL

CELLS = [
    pytest.param(case, phase, id=f"{case.name}-{phase}".replace(" ", "_"))
    for case in CASES
    for phase in case.phases
]


@pytest.mark.dist
@pytest.mark.timing
@pytest.mark.nightly
@pytest.mark.parametrize(("case", "phase"), CELLS)
def test_a_fault_harms_nobody_else(case, phase, tmp_path):
    cell = run_cell(case, phase, tmp_path, MODEL)
    assert cell.problems == ()
    if case.struck("kill"):
        assert cell.back_s is not None
        assert cell.merged_s > cell.back_s


def test_there_are_enough_cases_and_each_can_be_carried_out():
    assert len(CASES) >= 30
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.spoiled or case.strikes[0].at_s == 0, "it strikes in the phase"
        assert case.victim in ISLANDS
    kinds = {strike.kind for case in CASES for strike in case.strikes}
    assert kinds >= {"kill", "stop", "slow", "partition", "corrupt", "delay"}


def tick(number, time=0.0):
    return {"kind": "tick", "tick": number, "time": time}


def took(island, number):
    record = {"kind": "took", "tick": number}
    return {"kind": "island", "island": island, "record": record, "time": 0.0}


def merged(number, *islands, time=0.0):
    parts = [{"island": name} for name in islands]
    return {"kind": "merged", "tick": number, "contributions": parts, "time": time}


def write(path, *records):
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def test_phases_are_told_from_the_tape_and_from_the_merges_file(tmp_path):
    merging = tmp_path / "merging"
    phases = {phase: Phase(phase, "a", ("a", "b"), merging) for phase in PHASES}

    def told(*records):
        write(tmp_path / "tape.jsonl", *records)
        return {name for name, phase in phases.items() if phase(tmp_path)}

    for number in range(4):
        assert told(tick(number), took("a", number), merged(number, "b")) == set()
    for number in range(4, 6):
        found = told(tick(number), took("a", number), merged(number, "a", "b"))
    assert found == {"idle"}, "two merges of all"
    assert told(tick(8)) == set()
    assert told(took("b", 8)) == set(), "it is not the victim's"
    assert told(took("a", 8)) == {"transfer"}
    merging.touch()
    assert told() == {"transfer", "merge"}
    merging.unlink()
    assert told(merged(8, "a")) == {"idle"}
    assert told(tick(9), {"kind": "skipped", "tick": 9, "time": 0.0}) == {"idle"}


def of(case_name):
    return next(case for case in CASES if case.name == case_name)


def part(island, incarnation=1, end=0):
    return {"island": island, "incarnation": incarnation, "end": end}


def merge(time, fragment, *parts):
    return {
        "kind": "merged",
        "time": time,
        "fragment": fragment,
        "contributions": parts,
    }


def test_all_have_recovered_once_each_was_merged_in_its_next_life(tmp_path):
    recovered = Recovery(of("an island is killed"))
    tape, chaos = tmp_path / "tape.jsonl", tmp_path / "chaos.jsonl"
    everybody = [part(name) for name in ISLANDS]
    write(tape, merge(1.0, 0, *everybody), merge(2.0, 1, *everybody))
    assert not recovered(tmp_path), "nothing was struck"
    write(chaos, {"time": 3.0, "seconds": 0.0})
    assert not recovered(tmp_path)
    write(tape, merge(4.0, 0, *everybody), merge(5.0, 1, *everybody))
    assert not recovered(tmp_path), "a delta that the old life had left behind"
    write(tape, merge(6.0, 0, part("a", 2)))
    assert recovered(tmp_path)


def test_a_spoiled_island_recovers_once_all_of_it_is_merged_again(tmp_path):
    recovered = Recovery(of("the parameters of an island become NaN"))
    tape = tmp_path / "tape.jsonl"
    everybody = [part(name) for name in ISLANDS]
    write(tape, merge(1.0, 0, *everybody), merge(2.0, 1, *everybody))
    assert not recovered(tmp_path), "nothing was refused"
    write(tape, {"kind": "refused"}, merge(3.0, 0, *everybody))
    assert not recovered(tmp_path), "the other fragment may be refused yet"
    write(tape, merge(4.0, 1, *everybody))
    assert recovered(tmp_path)


def test_losses_are_held_to_the_open_steps_of_those_that_were_killed():
    islands = {name: {"tokens_lost": {"stopped": 900}} for name in ISLANDS}
    step = BATCH * SEQUENCE

    def problems(lost, **islands):
        left = {
            "kind": "left",
            "island": "a",
            "incarnation": 1,
            "steps": 10,
            "lost_tokens_by_fragment": lost,
        }
        tape = [merge(1.0, 0, part("a", end=4)), merge(2.0, 1, part("a", end=7)), left]
        summary = {"islands": islands}
        return list(loss_problems(of("an island is killed"), summary, tape))

    assert problems([6 * step, 3 * step], **islands) == []
    (found,) = problems([6 * step, 3 * step + 1], **islands)
    assert "fragment 1, with 3 steps" in found
    islands["b"] = {"tokens_lost": {"stale": 5}}
    assert problems([0, 0], **islands) == ["b was not killed and lost {'stale': 5}"]


def test_a_strike_outside_its_phase_is_a_problem():
    tape = [tick(1, 1.0)]
    struck = [{"time": 2.0, "strike": "a@0s:kill", "missed": []}]
    assert list(phase_problems("transfer", tape, struck)) == []
    (found,) = phase_problems("idle", tape, struck)
    assert "did not strike in the phase idle" in found
    missed = [{**struck[0], "missed": ["a"]}]
    assert list(phase_problems("merge", tape, missed)) == [
        "a@0s:kill met no process of ['a']"
    ]
    assert list(phase_problems("merge", tape, [])) == ["nothing was struck"]
