"""A node has one name, which a copy of its workdir may not lead by."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from diloco_jax import run_files
from diloco_jax.cluster.commands import free_port
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement
from diloco_jax.coordinator.mandates.folder import FolderStore
from diloco_jax.coordinator.standby.name import copied_from, node_of, read_name
from diloco_jax.coordinator.standby.node import StandbyNode
from diloco_jax.coordinator.standby.seat import taken
from diloco_jax.coordinator.workers.rendezvous import next_lead
from diloco_jax.protocol.outposts import first_number
from diloco_jax.wire.errors import Refused
from diloco_jax.workdir import RunFacts


def test_a_node_has_one_name_and_never_none(tmp_path: Path) -> None:
    name = node_of(tmp_path)
    assert name
    assert node_of(tmp_path) == name
    (tmp_path / "node").write_text("")
    assert node_of(tmp_path) not in ("", name)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A workdir whose node holds the mandate."""
    lead(tmp_path / "one")
    return tmp_path / "one"


def config(workdir: Path) -> Config:
    placement = Placement(
        mandate=str(workdir.parent / "mandate"), bind=f"127.0.0.1:{free_port()}"
    )
    return Config(islands={"a": IslandConfig()}, placement=placement)


def lead(workdir: Path) -> None:
    with contextlib.ExitStack() as opened:
        facts = RunFacts(run_id="r", begun_unix=0.0)
        taken(config(workdir), workdir, facts, "", opened)


def test_a_copy_is_told_by_its_file_and_its_place(one: Path, tmp_path: Path) -> None:
    assert copied_from(one) == ""
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    shutil.copytree(one, copy)
    assert copied_from(copy).endswith(f":{one}")
    one.rename(moved)
    assert copied_from(moved) == "", "it is the same file"
    shutil.copytree(copy, one)
    assert copied_from(one) == "", "restored where it was"
    (copy / "node").write_text(read_name(one))
    assert copied_from(copy) == "", "as a person says, or an earlier version wrote it"


def test_a_copy_does_not_lead_by_the_name_of_the_other_one(
    one: Path, tmp_path: Path
) -> None:
    """Both renewed the mandate, and let things be seen."""
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    with pytest.raises(Refused, match=f":{one}, holds the mandate, and this .* copy"):
        lead(copy)
    lead(one)
    (copy / "node").write_text(read_name(one))
    lead(copy)
    lead(copy)


def test_a_node_goes_on_with_its_reign_if_the_mandate_was_removed(one: Path) -> None:
    """Workers on other machines would refuse the next one: it is in its number."""
    next_lead(one, first_number(3, 1e9))
    shutil.rmtree(one.parent / "mandate")
    lead(one)
    _, mandate = FolderStore(config(one).placement.mandate).read(1.0)
    assert mandate is not None
    assert mandate.reign == 3
    follower = StandbyNode(config(one), one, "127.0.0.1:1", None)
    assert follower._machine.state.led == 3


def test_a_copy_leads_another_run_of_its_own(one: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(one, copy)
    lead(copy)
    assert copied_from(copy) == ""
    lead(copy)


def test_a_copy_follows_by_a_name_of_its_own(one: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    follower = StandbyNode(config(copy), copy, "127.0.0.1:1", None)
    assert follower.node == read_name(copy) != read_name(one)
    assert copied_from(copy) == ""
    again = StandbyNode(config(copy), copy, "127.0.0.1:1", None)
    assert again.node == follower.node


def test_a_copy_that_has_the_run_is_not_replaced(one: Path, tmp_path: Path) -> None:
    """It may be all that is left of the run."""
    (one / run_files.FACTS).write_text("{}")
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    with pytest.raises(ConfigError, match=r"is a copy of .* and has its run"):
        StandbyNode(config(copy), copy, "127.0.0.1:1", None)
    assert read_name(copy) == read_name(one)
    assert StandbyNode(config(one), one, "127.0.0.1:1", None).node == read_name(one)
