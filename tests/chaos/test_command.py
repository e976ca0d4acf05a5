"""Which strikes `diloco chaos` carries out, before anything is started."""

import dataclasses
import io
import signal

import pytest
from rich.console import Console

from diloco_jax import run_files
from diloco_jax.chaos.command import (
    strike_running,
    twin_of,
    with_faults,
    with_restarts,
)
from diloco_jax.chaos.schedule import ChaosOptions, of_options
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement, RunConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.observability.tape import Tape

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


# ---- a run that goes on already -----------------------------------------------------


@pytest.fixture
def going_on(tmp_path, children):
    """A workdir with a tape, and processes of its islands."""
    write_config_json(config(), tmp_path / run_files.CONFIG)
    tape = Tape(tmp_path / run_files.TAPE)
    merged = {"fragment": 0, "version": [1, 1], "final": False, "verdicts": {}}
    merged |= {"contributions": [], "share": 1.0, "digest": ""}
    tape.append({"kind": "merged", "time": 1.0, **merged})
    tape.close()
    return tmp_path, children


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


def test_more_kills_than_restarts_are_told_before(going_on):
    workdir, _ = going_on
    kills = tuple(f"b@{n / 100}s:kill" for n in range(3))
    assert "3 kills are planned" in strike(workdir, strikes=kills)[2]
