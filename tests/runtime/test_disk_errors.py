"""Whatever breaks of a coordinator's disk, from its start to its end, ends it with that
error, and closes everything."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from runtime_support import PATIENCE_S, coordinator, make_config

from diloco_jax.config import Config
from diloco_jax.coordinator import going_on, main
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.journal import RecordLog
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.snapshots import StateSnapshots
from diloco_jax.coordinator.summary import Announcer
from diloco_jax.errors import EXIT_DONE
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape


@pytest.fixture(scope="module")
def begun(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A run that was begun."""
    config, workdir = make_config(text), tmp_path_factory.mktemp("begun") / "run"
    with coordinator(config, workdir):
        pass
    return config, workdir


AT_A_START: dict[str, tuple[Any, str]] = {
    "the lock": (going_on, "held_by_one"),
    "the newest snapshot": (StateSnapshots, "newest"),
    "the tape": (Tape, "__init__"),
    "the log": (RecordLog, "__init__"),
    "metrics": (Metrics, "__init__"),
    "islands' measures": (Roster, "begin_from"),
}
AS_IT_LEADS: dict[str, tuple[Any, str]] = {
    "housekeeping": (Announcer, "refresh"),
    "a holder's thread": (Store, "warm_up"),
}


@pytest.mark.parametrize("what", [*AT_A_START, *AS_IT_LEADS, "the end"])
def test_an_error_of_the_disk_ends_it_wherever_it_comes_from(
    what: str, begun: tuple[Config, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    error, closes = OSError(errno.EROFS, "read-only file system", what), list[str]()

    def broken(*arguments: Any, **options: Any) -> NoReturn:
        raise error

    if what == "the end":
        monkeypatch.setattr(main.Coordinator, "run", lambda *_: EXIT_DONE)
        where: tuple[Any, str] = (Roster, "save")
    else:
        where = {**AT_A_START, **AS_IT_LEADS}[what]
    monkeypatch.setattr(*where, broken)
    close: Callable[[main.Coordinator], None] = main.Coordinator.close

    def closed(coordinator: main.Coordinator) -> None:
        close(coordinator)
        closes.append("closed")

    monkeypatch.setattr(main.Coordinator, "close", closed)
    config, workdir = begun
    with ThreadPoolExecutor(1) as threads:  # Signals are the test's own.
        serving = threads.submit(main.run, config, workdir, init=False)
        assert serving.exception(PATIENCE_S) is error
    assert closes == ["closed"]
