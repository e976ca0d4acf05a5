"""A workdir is of one run, of a format that can be read, and nobody shares it."""

import dataclasses
import json
import os

import pytest
from goldens import FOLDER, REGENERATE

from diloco_jax import cli, run_files
from diloco_jax import workdir as workdirs
from diloco_jax.cluster import status
from diloco_jax.config import (
    Config,
    ConfigError,
    IslandConfig,
    Placement,
    RunConfig,
    shared_fields,
)
from diloco_jax.files import write_json

GOLDEN = FOLDER / "run_fields.json"
"""The fields behind a fingerprint. REGENERATE=1 writes those of a new format."""


@pytest.fixture
def config():
    return Config(run=RunConfig(), islands={"a": IslandConfig()})


def test_a_run_is_found_as_it_was_begun(config, tmp_path):
    begun = workdirs.begin_run(config, tmp_path)
    assert workdirs.find_run(config, tmp_path) == begun


def test_another_config_is_refused_with_both_values(config, tmp_path):
    workdirs.begin_run(config, tmp_path)
    other = dataclasses.replace(config, run=RunConfig(seed=7))
    with pytest.raises(ConfigError, match="seed: 0 here, 7 there"):
        workdirs.find_run(other, tmp_path)


def test_another_format_is_refused_with_both_writers(config, tmp_path):
    of_another_format(config, tmp_path)
    with pytest.raises(ConfigError) as refused:
        workdirs.find_run(config, tmp_path)
    for shown in (str(tmp_path), "format 1", "diloco_jax 9.0"):
        assert shown in str(refused.value)
    assert f"reads format {workdirs.FORMAT}" in str(refused.value)


def of_another_format(config, workdir):
    """A workdir whose config has fields that this version does not know."""
    facts = workdirs.begin_run(config, workdir)
    dataclasses.replace(facts, format=1, written_by="diloco_jax 9.0").write(workdir)
    fields = json.loads((workdir / "config.json").read_bytes())
    fields["run"]["sync"]["tempo"] = 1
    write_json(fields, workdir / "config.json")


@pytest.mark.parametrize(
    "command", [["run", "--resume"], ["status"], ["eval"], ["replay"]], ids=" ".join
)
def test_whoever_reads_a_workdir_looks_at_its_format_first(
    config, tmp_path, capsys, command
):
    of_another_format(config, tmp_path)
    for name in ("tape.jsonl", "metrics.jsonl", "roster.msgpack", "summary.json"):
        (tmp_path / name).write_text("{}\n")
    assert cli.main([*command, str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "has format 1, written by diloco_jax 9.0" in shown
    assert "go on with the version that wrote it" in shown


def test_other_fields_of_a_run_are_another_format():
    """A `config.json` of before would have another fingerprint, as if it were of
    another run: raise `workdir.FORMAT` then, and regenerate."""
    found = {
        "format": workdirs.FORMAT,
        "fields": list(leaves(shared_fields(RunConfig()))),
    }
    golden = json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else {"format": 0}
    if REGENERATE and golden["format"] < workdirs.FORMAT:
        write_json(golden := found, GOLDEN)
    assert found == golden, "raise workdir.FORMAT, then once more with REGENERATE=1"


def leaves(fields, prefix=""):
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_what_is_no_run_file_is_named(config, tmp_path):
    workdirs.begin_run(config, tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": 3}))
    with pytest.raises(ConfigError, match=r"run\.json cannot be read .*copy"):
        workdirs.find_run(config, tmp_path)


@pytest.mark.parametrize("name", ["coordinator.lock", "."])
def test_what_is_held_is_refused_with_its_holder(tmp_path, name):
    path = tmp_path / name
    with workdirs.held(path, "somebody"):
        with (
            pytest.raises(ConfigError, match=f"{tmp_path} is in use by somebody") as e,
            workdirs.held(path, "somebody", patience_s=0.0),
        ):
            pass
        assert (f"process {os.getpid()}" in str(e.value)) == (name != ".")
    with workdirs.held(path, "somebody", patience_s=0.0):
        pass


@pytest.mark.parametrize("content", [b'{"phase": "do', b"", b"[3]", b"{}", b"\xff"])
def test_a_summary_that_was_cut_off_is_named(tmp_path, content):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"summary\.json .*restore it from a copy"):
        workdirs.read_summary(tmp_path)
    assert workdirs.read_summary(tmp_path / "none") == {}


def test_a_coordinator_may_end_while_it_is_looked_for(tmp_path, monkeypatch):
    """Its address is gone between two looks."""
    write_json({"phase": "done", "eval_loss": 2.0}, tmp_path / run_files.SUMMARY)
    address = tmp_path / run_files.ADDRESS
    address.write_text("127.0.0.1:9")
    looks = iter([lambda: None, address.unlink])
    monkeypatch.setattr(status, "require_format", lambda _: next(looks)())
    assert status.read_status(str(tmp_path), Placement())["phase"] == "done"


def test_scores_join_those_of_other_tasks(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"phase": "done"}))
    for task in ("a", "b"):
        workdirs.add_to_summary(tmp_path, {"eval_tasks": {task: 1}})
    assert workdirs.read_summary(tmp_path)["eval_tasks"] == {"a": 1, "b": 1}
