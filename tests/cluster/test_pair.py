"""Two coordinators of a local run: what cannot have a standby, and whose files stay."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from diloco_jax import run_files
from diloco_jax.cluster import pair
from diloco_jax.cluster.cluster import Cluster
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement
from diloco_jax.coordinator.mandates.folder import FolderStore
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate
from diloco_jax.workdir import RunFacts, held


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoints", "gs://bucket/folder"),
        ("first_from", "a"),
        ("bind", "0.0.0.0:7000"),
        ("advertise", "host.example:7000"),
    ],
)
def test_what_cannot_have_a_standby_is_named(field, value):
    placement = dataclasses.replace(Placement(), **{field: value})
    with pytest.raises(ConfigError) as refused:
        pair.require_pairable(placement)
    told = str(refused.value)
    assert f"placement.{field} = {value!r} and --with-standby" in told
    assert "leave one of them out" in told


def test_a_run_has_one_mandate(tmp_path):
    placement = Placement(mandate="gs://bucket/mandate")
    with pytest.raises(ConfigError, match="gs://bucket/mandate' and --with-standby"):
        pair.with_standby(placement, tmp_path)
    made = pair.with_standby(Placement(), tmp_path)
    assert pair.is_paired(made, tmp_path)
    assert not pair.is_paired(made, tmp_path / "other")
    # One that goes on, or is begun with the config of another one, has its own.
    assert not pair.is_local(made)
    (tmp_path / run_files.CONFIG).write_text("{}")
    assert pair.is_local(made)
    assert pair.with_standby(made, tmp_path).mandate == made.mandate
    other = pair.with_standby(made, tmp_path / "other")
    assert pair.is_paired(other, tmp_path / "other")
    config = Config(islands={"a": IslandConfig()}, placement=made)
    assert config.validate() is config


def node(folder: Path, name: str) -> None:
    """A coordinator's workdir, whose files all say its name."""
    for file in (
        "log/log-0.bin",
        "publishes/0/1-1.publish",
        "checkpoints/coordinator/state-1.snapshot",
        "roster.msgpack",
        "tape.000001.jsonl",
        "tape.jsonl",
        "metrics.jsonl",
        f"tensorboard/events.{name}",
        "summary.json",
        "node",
    ):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    RunFacts(run_id=name, begun_unix=0.0).write(folder)


def mandate_of(workdir: Path, holder: str) -> None:
    store = FolderStore(str(workdir / run_files.MANDATE))
    assert store.write(Mandate(run_id="r", holder=holder), NO_GENERATION, 1.0)


@pytest.fixture
def workdir(tmp_path) -> Path:
    """Both have the run; an island left a checkpoint, and the first one a log."""
    node(tmp_path, "one")
    node(pair.standby_of(tmp_path), "two")
    (tmp_path / "log" / "log-7.bin").write_text("one")
    (tmp_path / "publishes" / "1").mkdir()
    (tmp_path / "checkpoints" / "a").write_text("an island's")
    mandate_of(tmp_path, "one")
    return tmp_path


def state(workdir: Path) -> dict[str, str]:
    """Texts of the files of a coordinator's state."""
    return {
        path.relative_to(workdir).as_posix(): path.read_text()
        for place in pair._state(workdir)
        for path in ([place] if place.is_file() else sorted(place.rglob("*.*")))
        if path.name != run_files.FACTS
    }


def settled(workdir: Path, leader: str) -> None:
    """The workdir is that of this coordinator alone, whole."""
    found = state(workdir)
    assert set(found.values()) == {leader}
    assert ("log/log-7.bin" in found) == (leader == "one")
    assert len(found) == 8 + (leader == "one")
    left = {path.name for path in workdir.iterdir()}
    assert not left & {run_files.STANDBY, run_files.MANDATE, pair.WON, pair.MOVING}
    assert (workdir / "checkpoints" / "a").read_text() == "an island's"
    metrics = [(workdir / f).read_text() for f in ("metrics.000001.jsonl",)]
    assert [*metrics, (workdir / "metrics.jsonl").read_text()] == ["one", "two"]
    curves = {path.name for path in (workdir / "tensorboard").iterdir()}
    assert curves == {"events.one", "events.two"}


def test_the_state_is_that_of_the_one_that_led(workdir):
    assert not pair.standby_leads(workdir)
    pair.settle(workdir)
    settled(workdir, "one")
    pair.settle(workdir)
    settled(workdir, "one")


def test_the_state_of_a_standby_that_led_takes_the_place_of_the_firsts(workdir):
    store = FolderStore(str(workdir / run_files.MANDATE))
    generation, _ = store.read(1.0)
    store.write(Mandate(run_id="r", holder="two", reign=2), generation, 1.0)
    assert pair.standby_leads(workdir)
    pair.settle(workdir)
    settled(workdir, "two")


def test_a_first_one_in_the_midst_of_a_copy_has_no_run(workdir):
    (workdir / run_files.FACTS).unlink()
    pair.settle(workdir)
    settled(workdir, "two")


def test_settling_that_is_cut_off_anywhere_is_done_by_the_next(workdir, monkeypatch):
    (workdir / run_files.FACTS).unlink()
    real, left = Path.rename, 0

    def rename(self, target):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    renames = 0
    while True:
        left = 1  # The process is killed before its second one.
        try:
            pair.settle(workdir)
        except KeyboardInterrupt:
            renames += 1
        else:
            break
    assert renames > 8
    settled(workdir, "two")


def test_nothing_is_moved_under_a_coordinator_at_work(workdir):
    lock = pair.standby_of(workdir) / run_files.LOCK
    before = state(workdir)
    with held(lock, "a coordinator"), pytest.raises(ConfigError, match="in use by"):
        pair.settle(workdir)
    assert state(workdir) == before


def test_workers_that_outlived_a_lead_end_before_anything_is_moved(
    workdir, monkeypatch
):
    ended = []

    def end_others(place, count):
        ended.append((place, count, (place / "log" / "log-0.bin").read_text()))

    monkeypatch.setattr(pair.rendezvous, "end_others", end_others)
    pair.settle(workdir)
    other = pair.standby_of(workdir)
    assert ended == [(workdir, 0, "one"), (other, 0, "two")]


def test_the_address_is_that_of_whoever_leads(workdir):
    own, other = workdir / "coordinator.address", pair.standby_of(workdir)
    assert pair.address_file(workdir) == own
    (other / "coordinator.address").write_text("h:2")
    assert pair.address_file(workdir).read_text() == "h:2"
    own.write_text("h:1")
    assert pair.address_file(workdir).read_text() == "h:1"
    # Its coordinator is stopped, and leads no more.
    shutil.rmtree(workdir / run_files.MANDATE)
    mandate_of(workdir, "two")
    assert pair.address_file(workdir).read_text() == "h:2"


def test_who_is_started_again_follows_the_other_one(workdir):
    placement = pair.with_standby(Placement(bind="127.0.0.1:0"), workdir)
    cluster = Cluster(
        Config(islands={"a": IslandConfig()}, placement=placement), workdir
    )
    (first,) = cluster._coordinator_command(1)
    assert first[-1] == "--init"
    cluster.address = "127.0.0.1:7000"
    # Also where its copy is not whole, and looks like a run that has not begun.
    (workdir / "log" / "log-0.bin").unlink()
    (again,) = cluster._coordinator_command(2)
    assert again[-2:] == ["--standby-of", placement.standby]
    assert again[again.index("--bind") + 1] == cluster.address
    (other,) = cluster._standby_command(1)
    assert other[-2:] == ["--standby-of", cluster.address]
    assert other[other.index("--bind") + 1] == placement.standby
    folder = pair.standby_of(workdir)
    assert other[other.index("--workdir") + 1] == str(folder)
    assert cluster._roles() == {
        "coordinator": cluster.coordinator,
        "standby": cluster.standby,
    }
    (workdir / run_files.FACTS).unlink()
    assert cluster._roles()["coordinator"] is cluster.standby
    assert cluster.leading == folder
