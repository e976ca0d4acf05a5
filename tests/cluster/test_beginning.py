"""The workdir of a new run: whose it is, and what stays of a start that failed."""

import dataclasses

import pytest

from diloco_jax import workdir as workdirs
from diloco_jax.cluster.run import Beginning
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement, RunConfig
from diloco_jax.config.loading import read_config_json


@pytest.fixture
def config(tmp_path):
    placement = Placement(workdir=str(tmp_path / "run"))
    return Config(islands={"a": IslandConfig()}, placement=placement)


@pytest.fixture
def unnamed(config, tmp_path, monkeypatch):
    """Where no workdir is asked for."""
    monkeypatch.chdir(tmp_path)
    return dataclasses.replace(config, placement=Placement())


def test_the_workdir_of_another_run_is_refused_and_left_alone(config, tmp_path):
    with Beginning(config, "configs/x.py") as beginning:
        made = beginning.create()
    assert read_config_json(tmp_path / "run" / "config.json") == made
    other = dataclasses.replace(config, run=RunConfig(seed=1))
    with (
        Beginning(other, "configs/other.py") as beginning,
        pytest.raises(ConfigError) as caught,
    ):
        beginning.create()
    for shown in (
        str(tmp_path / "run"),
        "seed: 0 in that run, 1 in this config",
        "--workdir",
    ):
        assert shown in str(caught.value)
    assert read_config_json(tmp_path / "run" / "config.json") == made


def test_one_command_at_a_time_begins_in_a_workdir(config):
    refused = pytest.raises(ConfigError, match="run is in use by another command")
    with Beginning(config, "configs/x.py"), refused:
        Beginning(config, "configs/x.py")
    with Beginning(config, "configs/x.py") as beginning:
        beginning.create()


def test_without_a_workdir_the_run_is_named_after_its_config(unnamed, tmp_path):
    with Beginning(unnamed, "configs/x.py") as beginning:
        made = beginning.create()
    assert beginning.workdir.parent == tmp_path / "runs"
    assert beginning.workdir.name.startswith("x-")
    assert made.placement.workdir == str(beginning.workdir)


def test_two_of_one_second_have_workdirs_of_their_own(unnamed, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "now")
    with Beginning(unnamed, "x.py") as one, Beginning(unnamed, "x.py") as two:
        one.create()
        two.create()
    assert [one.workdir.name, two.workdir.name] == ["x-now", "x-now-2"]


def start(beginning):
    """Leave the files of a start before it fails."""
    beginning.create()
    (beginning.workdir / "run.json.17.tmp").touch()
    (beginning.workdir / "logs").mkdir()
    (beginning.workdir / "logs" / "a.log").touch()


@pytest.mark.parametrize("keep_logs", [False, True])
def test_nothing_stays_of_a_start_that_failed(config, tmp_path, keep_logs):
    with Beginning(config, "configs/x.py") as beginning:
        start(beginning)
        beginning.undo(keep_logs=keep_logs)
    left = [path.name for path in tmp_path.rglob("*")]
    assert left == (["run", "logs", "a.log"] if keep_logs else [])


def test_what_others_put_into_the_workdir_stays(config, tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    with Beginning(config, "configs/x.py") as beginning:
        (folder / "notes.txt").touch()
        (folder / "data.tmp").touch()
        beginning.create()
        beginning.undo()
    assert {path.name for path in folder.iterdir()} == {"logs", "notes.txt", "data.tmp"}


KILLED = r"what a killed start of this config left \(you may remove it\); give"
ANOTHER = r"another run of this config; give another --workdir$"
GOES_ON = r"this run; give another --workdir, or .*: diloco run --resume"
SNAPSHOT = "checkpoints/coordinator/state-1.snapshot"


@pytest.mark.parametrize(
    ("facts", "left", "said"),
    [
        (True, (), KILLED),
        (False, (), KILLED),
        (True, (f"{SNAPSHOT}.tmp",), KILLED),
        (True, ("summary.json",), ANOTHER),
        (False, (SNAPSHOT,), ANOTHER),  # Of a replay that saved it, or of a fork.
        (False, ("tape.jsonl",), ANOTHER),  # Of an emulation.
        (True, ("log",), GOES_ON),
        (True, (SNAPSHOT,), GOES_ON),
    ],
)
def test_what_a_killed_start_or_a_run_left_is_told_and_stays(
    config, tmp_path, facts, left, said
):
    with Beginning(config, "configs/x.py") as beginning:
        start(beginning)
    if facts:
        workdirs.begin_run(config, beginning.workdir)
    for name in left:
        (beginning.workdir / name).mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    with (
        Beginning(config, "configs/x.py") as beginning,
        pytest.raises(ConfigError, match=said),
    ):
        beginning.create()
    assert set(tmp_path.rglob("*")) == before


def test_a_run_that_a_coordinator_serves_is_left_alone(config, tmp_path):
    with Beginning(config, "configs/x.py") as beginning:
        beginning.create()
        (beginning.workdir / "coordinator.lock").touch()
        before = set(tmp_path.rglob("*"))
        with (
            workdirs.held(beginning.workdir / "coordinator.lock", "a coordinator"),
            pytest.raises(ConfigError, match="is in use by a coordinator"),
        ):
            beginning.create()
        assert set(tmp_path.rglob("*")) == before
