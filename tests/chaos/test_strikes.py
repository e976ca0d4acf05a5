"""Schedules of strikes: their forms, those drawn from a seed, and which ones `diloco
chaos` carries out, before anything is started."""

import dataclasses
import io
import signal

import pytest
from rich.console import Console

from diloco_jax import run_files
from diloco_jax.chaos import command
from diloco_jax.chaos.command import (
    strike_running,
    twin_of,
    with_faults,
    with_restarts,
)
from diloco_jax.chaos.schedule import (
    KINDS,
    OF_PROCESSES,
    ChaosOptions,
    Strike,
    of_options,
    parse_strikes,
    random_strikes,
)
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement, RunConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.observability.tape import Tape
from diloco_jax.workdir import held

ISLANDS = ("a", "b")


def test_forms_are_read_and_sorted():
    texts = ["a+b@60s:delay10=0.2", "coordinator@5.5s:kill", "b@30s:stop5"]
    found = parse_strikes(texts, ISLANDS)
    assert found == (
        Strike(at_s=5.5, who=("coordinator",), kind="kill"),
        Strike(at_s=30, who=("b",), kind="stop", seconds=5),
        Strike(at_s=60, who=("a", "b"), kind="delay", seconds=10, value=0.2),
    )
    assert parse_strikes(map(str, found), ISLANDS) == found


@pytest.mark.parametrize(
    "text",
    [
        *("a@5s:explode", "a@5:kill", "a@5s:kill3", "a@5s:stop", "a@5s:stop0"),
        *("a@5s:throttle3", "a@5s:throttle3=0", "a@5s:stop3=1", "", "@5s:kill"),
        *(
            "a@5s:full",
            "coordinator@5s:full3=1",
            "a@5s:slow3",
            "a@5s:slow3=0",
            "a@5s:slow3=1",
            "a@5s:corrupt3=1",
        ),
    ],
)
def test_another_form_is_refused_with_the_forms(text):
    with pytest.raises(ConfigError, match="the forms are"):
        parse_strikes([text], ISLANDS)


def test_a_full_disk_is_the_coordinators():
    (strike,) = parse_strikes(["coordinator@5s:full3"], ISLANDS)
    assert not strike.of_network
    with pytest.raises(ConfigError, match="write coordinator@5s:full3"):
        parse_strikes(["a+coordinator@5s:full3"], ISLANDS)


@pytest.mark.parametrize(
    ("first", "second"),
    [("a@5s:stop5", "a+b@9s:stop1"), ("a@5s:partition5", "coordinator@9s:delay1=1")],
)
def test_strikes_that_overlap_are_refused(first, second):
    with pytest.raises(ConfigError, match="begin it after 10 s"):
        parse_strikes([second, first], ISLANDS)
    parse_strikes([first, second.replace("@9s", "@10.1s")], ISLANDS)


def test_other_things_may_be_struck_meanwhile():
    texts = ["a@5s:stop5", "a@6s:kill", "b@6s:stop5", "a@6s:partition2"]
    assert len(parse_strikes(texts, ISLANDS)) == 4


def test_the_coordinators_links_are_those_of_all():
    (strike,) = parse_strikes(["coordinator@5s:partition-up3"], ISLANDS)
    assert strike.links(ISLANDS) == ISLANDS
    (strike,) = parse_strikes(["coordinator@5s:stop3"], ISLANDS)
    assert strike.links(ISLANDS) == ()


def test_a_seed_repeats_its_schedule_and_it_can_be_written():
    def drawn(seed, every_s=4.0):
        kinds = tuple(KINDS)
        return random_strikes(seed, ISLANDS, every_s=every_s, for_s=400, kinds=kinds)

    found = drawn(3)
    assert found == drawn(3) != drawn(4)
    assert [s.at_s for s in found] == [4.0 * n for n in range(1, 101)]
    assert {s.kind for s in found} == set(KINDS)
    struck = {s.who for s in found if s.kind in OF_PROCESSES}
    assert struck == {("a",), ("b",), ("coordinator",)}
    assert parse_strikes(map(str, found), ISLANDS) == found
    assert parse_strikes(map(str, drawn(3, 1.1)), ISLANDS)


CUT = ChaosOptions(strikes=("a@5s:partition3",))


def config():
    placement = Placement(restarts=2)
    islands = {"a": IslandConfig(), "b": IslandConfig()}
    return Config(run=RunConfig(), islands=islands, placement=placement)


def scheduled(options):
    return of_options(options, ("a", "b"))


def test_strikes_go_before_a_random_schedule():
    found, _ = scheduled(CUT)
    assert [str(s) for s in found] == ["a@5s:partition3"]
    options = ChaosOptions(schedule_seed=4, every_s=10.0, for_s=50.0)
    found, _ = scheduled(options)
    assert len(found) == 5
    other = dataclasses.replace(options, schedule_seed=5)
    assert found != scheduled(other)[0]


def test_a_file_has_strikes_by_time_and_faults_by_step(tmp_path):
    path = tmp_path / "schedule"
    path.write_text("# a site is lost\n\na+b@9s:kill\n  a#2@40:kill\n")
    options = ChaosOptions(strikes=("a@5s:stop1", "b@7:pause2"), schedule=str(path))
    strikes, faults = scheduled(options)
    assert [str(s) for s in strikes] == ["a@5s:stop1", "a+b@9s:kill"]
    assert faults == ("b@7:pause2", "a#2@40:kill")
    struck = with_restarts(with_faults(config(), faults), strikes)
    assert struck.placement.faults == faults
    assert struck.placement.restarts == 2 + 2, "one for each kill"
    alone = ChaosOptions(strikes=("b@7:pause2",))
    assert scheduled(alone) == ((), ("b@7:pause2",)), "nothing is drawn"


def test_a_fault_that_cannot_strike_is_refused():
    with pytest.raises(ConfigError, match=r"placement\.faults has a/1@9"):
        with_faults(config(), ("a/1@9:kill",))


def test_the_twin_has_a_folder_of_its_own_and_no_faults(tmp_path):
    struck = with_faults(config(), ("a@9:kill",))
    twin = twin_of(struck, tmp_path / "run").placement
    assert (twin.faults, twin.workdir) == ((), str(tmp_path / "run-twin"))


def test_the_twin_s_folder_is_looked_at_before_the_run(tmp_path, monkeypatch):
    """An hour of strikes went by before that was refused."""
    monkeypatch.setattr(command, "run_locally", pytest.fail)
    (tmp_path / "run-twin").mkdir()
    (tmp_path / "run-twin" / run_files.TAPE).touch()
    ours = config().replace("workdir", str(tmp_path / "run"))
    options = ChaosOptions(strikes=("a@0s:kill",), twin=True)
    with pytest.raises(
        ConfigError, match=r"--twin: .*run-twin, where .* a run already"
    ):
        command.run(ours, "mine.py", Console(), options)


# ---- a run that goes on already -----------------------------------------------------


@pytest.fixture
def going_on(tmp_path, children):
    """A workdir with a tape, the lock of its launcher, and processes of its islands."""
    write_config_json(config(), tmp_path / run_files.CONFIG)
    tape = Tape(tmp_path / run_files.TAPE)
    merged = {"fragment": 0, "version": [1, 1], "final": False, "verdicts": {}}
    merged |= {"contributions": [], "share": 1.0, "digest": ""}
    tape.append({"kind": "merged", "time": 1.0, **merged})
    tape.close()
    with held(tmp_path, "a launcher"):
        yield tmp_path, children


def strike(workdir, **options):
    console = Console(file=io.StringIO(), width=200)
    code, findings = strike_running(
        workdir, console, ChaosOptions(**options), settle_s=0.1
    )
    return code, findings, console.file.getvalue()


def test_a_run_that_goes_on_is_struck_from_now_on(going_on):
    workdir, made = going_on
    code, findings, said = strike(workdir, strikes=("b@0s:kill", "a@0.1s:stop0.2"))
    assert code == 0
    assert made["b"].wait(30) == -signal.SIGKILL
    assert made["a"].poll() is None
    assert findings["planned"] == ["b@0s:kill", "a@0.1s:stop0.2"]
    assert [o["who"] for o in findings["outcomes"]] == ["b", "a"]
    assert (workdir / run_files.CHAOS_REPORT).exists()
    assert "what they cost is watched" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strikes": ("a@0s:partition3",)}, r"a@0s:partition3: not in a run"),
        ({"strikes": ("a@7:kill",)}, r"a@7:kill: not in a run"),
        ({"strikes": ("a@0s:kill",), "twin": True}, r"--twin: not in a run"),
        ({"strikes": ("c@0s:kill",)}, r"there is no 'c'"),
    ],
)
def test_what_cannot_strike_it_is_refused_before_anything_is_struck(
    going_on, options, words
):
    workdir, made = going_on
    with pytest.raises(ConfigError, match=words):
        strike(workdir, **options)
    assert all(child.poll() is None for child in made.values())


def test_a_run_that_is_over_or_elsewhere_is_not_struck(going_on):
    workdir, made = going_on
    for child in made.values():
        child.kill()
        child.wait()
    with pytest.raises(ConfigError, match="no process of the run"):
        strike(workdir, strikes=("a@0s:kill",))


def test_what_a_launcher_left_behind_may_be_anothers_by_now(tmp_path, children):
    """Its numbers of processes are given again, after a reboot at the latest."""
    write_config_json(config(), tmp_path / run_files.CONFIG)
    with pytest.raises(ConfigError, match="no process of the run"):
        strike(tmp_path, strikes=("a@0s:kill",))
    assert children["a"].poll() is None


def test_more_kills_than_restarts_are_told_before(going_on):
    workdir, _ = going_on
    kills = tuple(f"b@{n / 100}s:kill" for n in range(3))
    assert "3 kills are planned" in strike(workdir, strikes=kills)[2]
