"""The exit code of a standby that has taken over, by which a supervisor goes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from diloco_jax.cluster.commands import free_port
from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.coordinator.mandates.folder import FolderStore
from diloco_jax.coordinator.standby import process
from diloco_jax.coordinator.standby.node import StandbyOutcome
from diloco_jax.coordinator.standby.seat import MANDATE, taken
from diloco_jax.coordinator.standby.unseated import Unseated
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.files import StorageAway
from diloco_jax.protocol.standby.mandate import Mandate
from diloco_jax.wire.errors import Refused
from diloco_jax.workdir import RunFacts

Rewrite = Callable[[Mandate], Mandate]


class TakesOver:
    """A standby's half that leads at once, from its log."""

    def __init__(self, *given: object) -> None:
        pass

    def run(self) -> StandbyOutcome:
        return StandbyOutcome("log", "r")


class OnlySeat:
    """A coordinator that does nothing but take its seat."""

    seat = Unseated()

    def __init__(self, config: Config, workdir: Path, *, init: bool) -> None:
        assert not init
        self.config, self._workdir = config, workdir

    def heed_signals(self) -> None:
        pass

    def start(self, serves: Callable[[], None]) -> None:
        with contextlib.ExitStack() as opened:
            facts = RunFacts(run_id="r", begun_unix=0.0)
            taken(self.config, self._workdir, facts, "", opened)

    def run(self, touch: Callable[[], None]) -> int:
        return 0

    def conclude(self) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Rewrite], int]:
    """The exit code of a standby, if what it finds in the mandate is rewritten between
    its take-over and its start as the coordinator."""
    placement = Placement(
        mandate=str(tmp_path / "mandate"),
        bind=f"127.0.0.1:{free_port()}",
        time_budget_s=1.0,
    )
    config = Config(islands={"a": IslandConfig()}, placement=placement)
    monkeypatch.setattr(process, "StandbyNode", TakesOver)
    monkeypatch.setattr(process.main, "Coordinator", OnlySeat)
    follow = functools.partial(process.run_standby, config, tmp_path / "two", "h:1")

    def end(rewrite: Rewrite) -> int:
        assert follow() == 0
        store = FolderStore(placement.mandate)
        generation, mandate = store.read(1.0)
        assert mandate is not None
        assert store.write(rewrite(mandate), generation, 1.0)
        return follow()

    return end


def test_one_that_lost_the_mandate_as_it_started_is_to_be_started_again(
    end: Callable[[Rewrite], int], caplog: pytest.LogCaptureFixture
) -> None:
    """It ended with 3, which no supervisor repeats."""
    code = end(lambda mandate: replace(mandate, holder="other", reign=2, life="x"))
    assert code == EXIT_FAILED
    assert "node other holds the mandate in reign 2" in caplog.text
    assert "start it again as it is, with --standby-of" in caplog.text


def test_one_that_ceded_the_mandate_is_to_be_started_again(
    end: Callable[[Rewrite], int],
) -> None:
    ceded = end(lambda mandate: replace(mandate, ceded=True, in_step="other"))
    assert ceded == EXIT_FAILED


def test_the_mandate_of_another_run_is_refused_for_good(
    end: Callable[[Rewrite], int],
) -> None:
    with pytest.raises(Refused, match="for run s, the workdir holds run r") as refused:
        end(lambda mandate: replace(mandate, run_id="s"))
    assert refused.value.code == MANDATE


def test_an_object_that_does_not_answer_is_no_bad_config(
    end: Callable[[Rewrite], int], tmp_path: Path
) -> None:
    def as_it_is(mandate: Mandate) -> Mandate:
        return mandate

    assert end(as_it_is) == 0
    folder = tmp_path / "mandate"
    folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    with pytest.raises(StorageAway, match="did not answer within"):
        end(as_it_is)
