"""Failures, joins and departures in an emulated run, and the books that they leave."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulate_support import check_books, make_config, with_placement
from tiny import SEQUENCE_LENGTH

from diloco_jax import EmulationOptions, emulate
from diloco_jax.config import ConfigError
from diloco_jax.protocol.coordinator.state import Alert
from diloco_jax.simulation.bodies import Diary
from diloco_jax.simulation.coordinator import World

LIVES = "diloco_jax.simulation.emulate.LIVES_IN_VAIN"


def test_a_kill_costs_what_was_not_merged(text) -> None:
    config = with_placement(make_config(text, steps=40), faults=("b@13:kill",))
    result = emulate(config, options=EmulationOptions(down_seconds=3.0))
    check_books(result)
    victim = result.summary["islands"]["b"]
    # The steps of less than a cycle in every fragment.
    assert 0 < victim["tokens_lost"]["died"] <= 4 * 2 * SEQUENCE_LENGTH
    assert victim["joins"] == 2
    assert result.summary["islands"]["a"]["tokens_lost"] == {}
    lives = result.history.frame("lives")
    assert lives[lives.island == "b"].end.tolist() == ["died", "finished"]
    died, back = lives[lives.island == "b"].iloc[0], lives[lives.island == "b"].iloc[1]
    assert back.began == died.ended + 3.0
    # It begins at the newest version, not at those that it once joined with.
    adoptions = result.history.frame("adoptions")
    again = adoptions[(adoptions.island == "b") & (adoptions.incarnation == 2)]
    assert again.version.min() > 3


def test_if_nobody_is_left_the_user_is_told(text) -> None:
    options = EmulationOptions(joins={"a": (0.0, 5.0), "b": (0.0, 6.0)})
    with pytest.raises(ConfigError, match=r"at .* s no island is left.* of its 1536"):
        emulate(make_config(text), options=options)


def test_a_coordinator_that_is_away_costs_nobody_a_step(text) -> None:
    config = make_config(text, steps=60)
    calm = emulate(config)
    faults = ("coordinator@9:kill", "coordinator@20:pause2.5")
    struck = with_placement(config, faults=faults)
    result = emulate(struck, options=EmulationOptions(down_seconds=7.0))
    check_books(result)
    merges = result.history.frame("merges")
    gaps = merges.time.diff().fillna(0)
    usual = calm.history.frame("merges").time.diff().max()
    assert (gaps > usual).sum() == 2, "it was away twice"
    assert gaps[9] > 7.0, "after its ninth merge"
    assert 2.5 < gaps[20] < 7.0, "after the twentieth"
    for name, island in result.summary["islands"].items():
        assert island["joins"] == 1, "islands come back as they were"
        assert island["tokens_lost"] == {}
        assert island["stalled_seconds"] == pytest.approx(0, abs=1e-6)
        assert island["steps"] == calm.summary["islands"][name]["steps"]
    for of_fragment in merges.groupby("fragment").version.apply(list):
        assert of_fragment == sorted(set(of_fragment)), "no version twice"
    dies = with_placement(config, faults=("coordinator@9:pause8", "b@20:kill"))
    result = emulate(dies, options=EmulationOptions(down_seconds=2.0))
    check_books(result)
    assert result.summary["islands"]["b"]["joins"] == 2
    back = result.history.frame("lives").query("island == 'b'").iloc[1].first_step
    ninth = result.history.merges["time"][8]
    assert back >= ninth + 8.0, "nobody joins while it is away"


def test_failures_without_progress_between_them_end_it(text, monkeypatch) -> None:
    monkeypatch.setattr(LIVES, 20)

    hopeless = EmulationOptions(failure_every_seconds=0.01)
    with pytest.raises(ConfigError, match=r"seconds = 0.01: .* 20 .* of its 1536") as e:
        emulate(make_config(text), options=hopeless)
    with pytest.raises(ConfigError, match=re.escape(str(e.value))):
        emulate(make_config(text), options=hopeless)
    # Those with progress between them are counted anew.
    monkeypatch.setattr(LIVES, 3)
    options = EmulationOptions(failure_every_seconds=20.0, down_seconds=2.0)
    found = emulate(make_config(text, steps=60, quorum=1), options=options)
    assert found.history.lives["end"].tolist().count("died") > 3


def test_alerts_are_as_many_as_a_runs_and_name_absent_islands(
    text, monkeypatch
) -> None:
    run = World.run

    def alerting(world: World) -> None:
        for number in range(25):
            world.coordinator.carry_out(Alert(text=f"{number}"))
        run(world)

    monkeypatch.setattr(World, "run", alerting)
    options = EmulationOptions(joins={"b": (1000.0, 2000.0)})
    found = emulate(make_config(text, quorum=1), options=options).summary["alerts"]
    assert found == [
        *(f"{number}" for number in range(5, 25)),
        "island b never made a step: see its log",
    ]


def test_a_diverged_emulation_tells_of_skipped_steps(text) -> None:
    result = emulate(make_config(text).replace("inner.learning_rate", 1e12))
    steps = result.history.frame("steps")
    for name, island in result.summary["islands"].items():
        diverged = int(steps[steps.island == name].loss.isna().sum())
        assert 0 < diverged <= island["skipped_steps"] < island["steps"]


def test_an_island_takes_part_for_a_while(text) -> None:
    config = make_config(text, steps=30, quorum=1)
    options = EmulationOptions(joins={"b": (5.0, 15.5)})
    result = emulate(config, options=options)
    check_books(result)
    steps = result.history.frame("steps")
    mine = steps[steps.island == "b"]
    assert (mine.began.min(), mine.time.max()) == (5.0, 15.0)
    assert result.history.lives["end"].tolist() == ["finished", "left"]
    computed = result.summary["islands"]["b"]["tokens_computed"]
    assert computed == len(mine) * 2 * SEQUENCE_LENGTH
    # Without it, the other one goes on alone, and the run has its tokens.
    assert result.summary["islands"]["a"]["steps"] > 30
    assert result.summary["phase"] == "done"


def test_measures_are_of_completed_steps_and_stalls_never_negative():
    chance = np.random.default_rng(0)
    for _ in range(20):
        seconds = chance.exponential(0.1, 50).tolist()
        ends = np.cumsum(seconds).tolist()
        diary = Diary(
            island="a",
            incarnation=1,
            tokens_per_step=1,
            began=0.0,
            compile_seconds=0.0,
            steps=2,
            rows=[
                [began, each, 0.1, 1.0, index != 1, 3]
                for index, (began, each) in enumerate(
                    zip([0.0, *ends], seconds, strict=False)
                )
            ],
        )
        measures = diary.measures()
        assert (measures.skipped_steps, measures.tokens_predicted) == (1, 6)
        diary.steps = 50
        assert 0 <= diary.measures().stalled_seconds < 1e-9
