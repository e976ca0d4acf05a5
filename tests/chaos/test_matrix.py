"""Real runs under `diloco chaos`: every fault in every phase, at night."""

import pytest
from fault_cases import CASES, ISLANDS
from fault_matrix import BATCH, SEQUENCE, loss_problems, phase_problems, run_cell
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
    tape = [{"kind": "tick", "tick": 1, "time": 1.0}]
    struck = [{"time": 2.0, "strike": "a@0s:kill", "missed": []}]
    assert list(phase_problems("transfer", tape, struck)) == []
    (found,) = phase_problems("idle", tape, struck)
    assert "did not strike in the phase idle" in found
    missed = [{**struck[0], "missed": ["a"]}]
    assert list(phase_problems("merge", tape, missed)) == [
        "a@0s:kill met no process of ['a']"
    ]
    assert list(phase_problems("merge", tape, [])) == ["nothing was struck"]
