"""The process of a coordinator, the same on any machine."""

import dataclasses
import logging
import os
import signal

import jax
import pytest
import tiny

from diloco_jax import checkpoint, cli, run_files
from diloco_jax.config import Config, DataConfig, IslandConfig, RunConfig, SyncConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import journal as durable
from diloco_jax.coordinator import main
from diloco_jax.coordinator.snapshots import states
from diloco_jax.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED
from diloco_jax.process import signals
from diloco_jax.workdir import RunFacts, holds_run


@pytest.fixture
def any_platform():
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "")
    yield
    jax.config.update("jax_platforms", before)


def test_it_computes_on_the_cpu(any_platform, monkeypatch, tmp_path):
    platforms = []

    def coordinator(*args, **kwargs):
        platforms.append(jax.config.jax_platforms)
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "Coordinator", coordinator)
    with pytest.raises(KeyboardInterrupt):
        main.run(None, tmp_path, init=True)
    assert platforms == ["cpu"]


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one line of text\n" * 2000)
    run = RunConfig(
        model=tiny.MODEL,
        data=DataConfig(paths=(str(text),)),
        sync=SyncConfig(fragments=2),
        sequence_length=tiny.SEQUENCE_LENGTH,
        total_tokens=100_000,
    )
    return resolve(Config(run=run, islands={"a": IslandConfig()}).validate())


@pytest.fixture
def handlers():
    """Handlers of signals are as they were afterwards."""
    before = {number: signal.getsignal(number) for number in signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Killed(BaseException):
    """At some point of a start."""


def test_killed_between_first_snapshot_and_log(config, monkeypatch, tmp_path):
    workdir = tmp_path / "run"

    def killed(folder, after, repeat):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(durable, "RecordLog", killed)
        coordinator = main.Coordinator(config, workdir, init=True)
        with pytest.raises(Killed):
            coordinator.start()
        coordinator.close()

    again = main.Coordinator(config, workdir, init=True)
    again.start()
    written = int(max((workdir / run_files.LOG).iterdir()).stem.split("-")[1])
    assert again.conclude() == EXIT_DONE
    again.close()
    # What is written after snapshot 0 is read after it, and in the next snapshot.
    assert written == 1
    folder = checkpoint.snapshots_folder(config.placement, workdir)
    assert states(folder) == [0, 1]


def test_an_address_file_is_for_this_machine(config, tmp_path):
    placement = dataclasses.replace(config.placement, bind="0.0.0.0:0", insecure=True)
    config = dataclasses.replace(config, placement=placement)
    coordinator = main.Coordinator(config, tmp_path / "run", init=True)
    coordinator.start()
    address = (tmp_path / "run" / run_files.ADDRESS).read_text()
    coordinator.close()
    assert address == coordinator.address.replace("0.0.0.0", "127.0.0.1")


def test_asked_to_end_as_soon_as_its_address_is_told(config, handlers, tmp_path):
    """It ends as at any later time; the address of one that is gone misleads the next
    start's islands."""
    told = tmp_path / "run" / run_files.ADDRESS

    class Asks(main.Coordinator):
        def _tell_address(self):
            super()._tell_address()
            assert told.exists()
            os.kill(os.getpid(), signal.SIGTERM)

    def dies(number, frame):
        raise Killed

    signal.signal(signal.SIGTERM, dies)
    assert main.serve(Asks(config, tmp_path / "run", init=True)) == EXIT_DONE
    assert not told.exists()


def test_asked_to_end_while_it_searches_islands(config, handlers, caplog, tmp_path):
    """It ends in order, and leaves nothing that looks like a run."""

    class Asks(main.Coordinator):
        def heed_signals(self):
            super().heed_signals()
            os.kill(os.getpid(), signal.SIGTERM)

    caplog.set_level(logging.INFO, main.__name__)
    assert main.serve(Asks(config, tmp_path / "run", init=False)) == EXIT_DONE
    assert "ending, asked to: this coordinator has lost its state" in caplog.text
    assert not holds_run(tmp_path / "run")


def test_asked_twice_to_end_it_ends_at_once(config, handlers, tmp_path, monkeypatch):
    """As while it waits for a disk that hangs."""
    codes: list[int] = []
    monkeypatch.setattr(main.os, "_exit", codes.append)
    coordinator = main.Coordinator(config, tmp_path / "run", init=True)
    coordinator.heed_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert codes == []
    os.kill(os.getpid(), signal.SIGINT)
    assert codes == [EXIT_FAILED]
    coordinator.close()


def test_the_run_that_a_person_names_is_gathered(config, tmp_path, monkeypatch):
    """Unless the workdir holds another one."""
    write_config_json(config, tmp_path / "config.json")
    given = []
    monkeypatch.setattr(main, "serve", lambda made: given.append(made.gathers) or 0)
    words = ["coordinator", str(tmp_path / "config.json"), "--run-id", "run-1"]
    words += ["--bind", "127.0.0.1:0", "--workdir", str(tmp_path / "run")]
    assert cli.main(words) == 0
    assert given == ["run-1"]
    (tmp_path / "run").mkdir(exist_ok=True)
    RunFacts(run_id="run-2", begun_unix=0.0).write(tmp_path / "run")
    assert cli.main(words) == EXIT_CONFIG
    assert given == ["run-1"]
