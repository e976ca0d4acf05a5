"""A coordinator that must not start says why, and writes nothing. What a command line
or a config says wrong is in the table of `tests/wrong_inputs.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_support import coordinator, make_config, placed, with_run

from diloco_jax import compilation
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.coordinator.service import SearchError
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.models.build import build, build_plan
from diloco_jax.wire.errors import SecurityError


@pytest.fixture(scope="module")
def config(text) -> Config:
    return make_config(text)


@pytest.fixture
def used() -> Iterator[str]:
    """An address at which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def refused_start(config: Config, workdir: Path, *, init: bool) -> str:
    """The message with which a coordinator does not start; nothing is written."""
    before = sorted(workdir.rglob("*")) if workdir.exists() else None
    with pytest.raises((ConfigError, SecurityError)) as refused:
        Coordinator(config, workdir, init=init)
    assert before == (sorted(workdir.rglob("*")) if workdir.exists() else None)
    return str(refused.value)


def test_a_port_in_use_is_refused_before_a_run_is_begun(config, used, tmp_path):
    message = refused_start(placed(config, bind=used), tmp_path / "run", init=True)
    assert f"cannot bind {used}: Address already in use" in message
    assert "stop it, or give another port" in message


def test_a_merge_route_that_is_not_to_be_had_is_refused(config, tmp_path, monkeypatch):
    def absent():
        raise compilation.NativeError("no C compiler")

    monkeypatch.setattr(compilation, "_passes", absent)
    native = placed(config, merge_route="native")
    message = refused_start(native, tmp_path / "run", init=True)
    assert 'placement.merge_route = "native", and merges go by "xla" here' in message


def test_another_address_needs_certificates_that_are_there(config, tmp_path):
    bare = placed(config, bind="0.0.0.0:0")
    message = refused_start(bare, tmp_path / "run", init=True)
    assert "0.0.0.0:0 is not loopback and no certificates are given" in message
    assert "`diloco certs`" in message
    missing = placed(bare, certificates=str(tmp_path / "none"))
    message = refused_start(missing, tmp_path / "run", init=True)
    assert f"{tmp_path / 'none' / 'ca.pem'} (No such file" in message
    assert "`diloco certs`" in message


def test_more_fragments_than_the_model_has_are_refused(config, tmp_path):
    sync = dataclasses.replace(config.run.sync, fragments=99, fragment_by="layer")
    many = with_run(config, sync=sync)
    message = refused_start(many, tmp_path / "run", init=True)
    assert "sync.fragments = 99, sync.fragment_by = 'layer': " in message
    assert re.search(r"choose fragments between 1 and \d+, or deal them", message)


def test_deltas_that_find_no_room_are_refused(config, tmp_path):
    plan = build_plan(config.run, build(config.run))
    codec = get_codec(config.run.sync.codec_up)
    largest = max(PayloadLayout.of(codec, p).total_bytes for p in plan.fragments)
    small = placed(config, merge_buffer_bytes=2 * largest - 1)
    message = refused_start(small, tmp_path / "run", init=True)
    assert f"placement.merge_buffer_bytes = {2 * largest - 1}, but" in message
    assert f"{largest} bytes each (sync.codec_up = 'int8')" in message
    assert f"2 islands; give at least {2 * largest}, or more" in message
    Coordinator(placed(config, merge_buffer_bytes=2 * largest), tmp_path, init=True)
    guest = placed(config, merge_buffer_bytes=3 * largest - 1, admit=("guest",))
    message = refused_start(guest, tmp_path / "guest", init=True)
    assert f"3 islands; give at least {3 * largest}, or more" in message
    # One of the workers has all deltas of a fragment, and half of the room.
    shared = placed(config, merge_buffer_bytes=4 * largest - 1, workers=2)
    message = refused_start(shared, tmp_path / "shared", init=True)
    assert "placement.workers = 2 have equal parts of it" in message
    assert f"give at least {4 * largest}, or more" in message


def test_an_empty_disk_is_not_initialised(config, tmp_path):
    hasty = placed(config, time_budget_s=0.5)
    survivor = Coordinator(hasty, tmp_path / "run", init=False)
    # No ConfigError, with which it would end with 2, and no supervisor start it again.
    with contextlib.closing(survivor), pytest.raises(SearchError) as refused:
        survivor.start()
    assert not (tmp_path / "run").exists()
    message = str(refused.value)
    assert f"{tmp_path / 'run'} holds no run" in message
    assert "without --init nothing is initialised; no island offered" in message
    assert "within 1 s. Give the workdir of the run, start its islands" in message


def test_a_run_that_was_stopped_as_a_whole_has_no_islands_to_wait_for(config, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run .* nothing is initialised; g"):
        Coordinator(config, tmp_path / "run", init=False, resume=True)


def test_a_workdir_without_its_snapshots_is_not_initialised(config, tmp_path):
    with coordinator(config, tmp_path):
        pass
    shutil.rmtree(tmp_path / "checkpoints")
    tape = (tmp_path / "tape.jsonl").read_bytes()
    survivor = Coordinator(config, tmp_path, init=False)
    with pytest.raises(ConfigError, match=r"no snapshot .* with --init in another"):
        survivor.start()
    assert (tmp_path / "tape.jsonl").read_bytes() == tape


def test_a_run_whose_first_snapshot_was_not_written_begins_again(
    config, tmp_path, monkeypatch
):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr("diloco_jax.coordinator.main.StateSnapshots.save", killed)
        first = Coordinator(config, tmp_path, init=True)
        with pytest.raises(KeyboardInterrupt):
            first.start()
        first.close()
    second = Coordinator(config, tmp_path, init=False)
    with pytest.raises(ConfigError, match=r"no snapshot .* start it with --init again"):
        second.start()
    second.close()
    with coordinator(config, tmp_path):
        pass
    lines = (tmp_path / "tape.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[0] == "begun"
    assert kinds.count("begun") == 1
    third = refused_start(config, tmp_path, init=True)
    assert "leave --init out to go on with it" in third


def test_a_workdir_of_another_run_is_refused(config, tmp_path):
    Coordinator(config, tmp_path, init=True)
    for init in (False, True):
        other = with_run(config, seed=1)
        message = refused_start(other, tmp_path, init=init)
        assert re.search(r"holds run \w{16} with another config", message)
        assert "seed: 0 here, 1 there (here: the workdir's)" in message
        assert "Choose another --workdir" in message


def test_a_folder_of_checkpoints_that_cannot_be_made_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "in")
    message = refused_start(
        placed(config, checkpoints=folder), tmp_path / "run", init=True
    )
    assert f"cannot write checkpoints to {folder}/coordinator as user " in message
    assert "give another folder as --checkpoints" in message


def test_init_does_not_begin_twice_a_run_that_nobody_joined(config, tmp_path):
    with coordinator(config, tmp_path):
        pass
    alerts = json.loads((tmp_path / "summary.json").read_bytes())["alerts"]
    assert alerts == [f"island {n} never made a step: see its log" for n in "ba"]
    message = refused_start(config, tmp_path, init=True)
    assert re.search(r"holds run \w{16} already; choose another --workdir", message)
