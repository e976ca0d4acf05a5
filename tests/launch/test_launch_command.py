"""`diloco launch` as people meet it: dry runs, questions, refusals."""

import dataclasses
import io
import json
import shlex
import subprocess
import sys

import pytest

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.launch.command import LaunchOptions, run

BACKENDS = ("tpu_vm", "gke")


@pytest.fixture
def path(config, tmp_path):
    """A configs file on disk."""
    write_config_json(config, tmp_path / "two.json")
    return str(tmp_path / "two.json")


@pytest.mark.parametrize("on", BACKENDS)
def test_a_dry_run_writes_files_and_prints_lines_that_the_tools_take(
    on, cloud_on_path, path, tmp_path, capsys
):
    cloud = cloud_on_path
    assert cli.main(["launch", path, "--on", on, "--dry-run"]) == 0
    assert cloud.calls == []
    shown = capsys.readouterr()
    files = sorted(file.name for file in (tmp_path / "run/launch").iterdir())
    assert len(files) == {"tpu_vm": 4, "gke": 7}[on]
    assert all(f"written: {tmp_path}/run/launch/{name}" in shown.err for name in files)
    # No key is made, and nothing counts as made.
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == ["launch"]
    assert cli.main(["launch", path, "--on", on, "--yes"]) == 0
    dry = [shlex.split(line) for line in shown.out.splitlines()]
    assert [line for line in dry if "get-credentials" not in line] == cloud.changes()


@pytest.mark.parametrize("on", BACKENDS)
def test_the_source_of_the_weights_reaches_the_coordinator_alone(
    on, cloud, path, tmp_path, capsys
):
    source = "run:gs://bucket/a-run"
    command = ["launch", path, "--on", on, "--dry-run"]
    assert cli.main([*command, "--init", source]) == 0
    files = {f.name: f.read_text() for f in (tmp_path / "run/launch").iterdir()}
    having = [name for name, text in files.items() if source in text]
    assert len(having) == 1
    assert "coordinator" in having[0]
    assert cli.main([*command, "--init", f"hf:{tmp_path}"]) == 2
    assert f"{tmp_path} is a folder of this machine" in capsys.readouterr().err


@pytest.mark.parametrize("on", BACKENDS)
def test_a_dry_run_of_the_other_actions(on, cloud, path, capsys, launch):
    launch(on)
    cloud.changes()
    for action in ("stop", "run", "logs", "delete"):
        assert (
            cli.main(["launch", path, "--on", on, "--action", action, "--dry-run"]) == 0
        )
        out = capsys.readouterr().out
        assert "two-v5p" in out
    assert cloud.calls == []


def test_people_are_asked(cloud, config, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    options = LaunchOptions(on="tpu_vm")
    for answer, made in (("n\n", False), ("\n", False), ("y\n", True)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert run(config, "two.py", options) == 0
        assert bool(cloud.things) == made
    assert "run these 12 commands? [y/N]" in capsys.readouterr().err


def test_without_a_terminal_nobody_is_asked(cloud, config, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigError, match="give --yes"):
        run(config, "two.py", LaunchOptions(on="tpu_vm"))
    assert cloud.calls == []


def test_settings_can_be_given_on_the_command_line(cloud, path, tmp_path, capsys):
    line = (
        f"launch {path} --on tpu_vm --dry-run --launch.project other-project "
        f"--launch.purchase.v6e.b reserved --workdir {tmp_path}/there"
    )
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    assert out.count("--project=other-project") == 12
    assert "--reserved" in out
    assert (tmp_path / "there/launch/coordinator.sh").is_file()


def test_an_unknown_zone_is_remarked_upon(path, capsys):
    line = f"launch {path} --on gke --dry-run --launch.zones.v5p us-east5-c"
    assert cli.main(line.split()) == 0
    said = capsys.readouterr().err
    assert "note: us-east5-c is not among the zones known to offer v5p" in said


@pytest.mark.parametrize("field", ["image", "cloud_image"])
def test_an_image_without_a_digest_is_told(cloud, launch, capsys, field):
    digest = "@sha256:" + 64 * "a"
    images = {"image": f"r.example/a{digest}", "cloud_image": f"b{digest}"}
    assert launch("tpu_vm", **images) == 0
    assert "write its digest" not in capsys.readouterr().err
    assert launch("tpu_vm", **{**images, field: "r.example/c:1"}) == 0
    lines = capsys.readouterr().err.splitlines()
    (note,) = [line for line in lines if "write its digest" in line]
    assert f"launch.{field} = 'r.example/c:1' is a name that may come to" in note


@pytest.mark.parametrize(
    ("islands", "coordinator", "told"),
    [
        ("", "", ["service_account is empty", "act as one account"]),
        ("i@p.iam", "", ["act as one account"]),
        ("i@p.iam", "i@p.iam", ["act as one account"]),
        ("i@p.iam", "c@p.iam", []),
    ],
)
def test_accounts_that_may_do_too_much_are_told(
    cloud, launch, capsys, islands, coordinator, told
):
    accounts = {"service_account": islands, "coordinator_account": coordinator}
    assert launch("tpu_vm", **accounts) == 0
    lines = capsys.readouterr().err.splitlines()
    notes = [line for line in lines if line.startswith("note: ") and "account" in line]
    assert len(notes) == len(told)
    assert all(text in note for text, note in zip(told, notes, strict=True))


def test_a_tool_that_is_missing_is_named(config, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(config, "two.py", LaunchOptions(on="tpu_vm", yes=True)) == 1
    assert "gcloud is not on this machine; install" in capsys.readouterr().err


def test_a_command_that_does_not_end_is_given_up(config, monkeypatch, capsys):
    def endless(arguments, **options):
        raise subprocess.TimeoutExpired(arguments, options["timeout"])

    monkeypatch.setattr("diloco_jax.launch.calls.subprocess.run", endless)
    assert run(config, "two.py", LaunchOptions(on="tpu_vm", yes=True)) == 1
    said = capsys.readouterr().err
    assert "did not end within 120 s" in said
    assert "it takes up what is there" in said


def test_a_run_is_launched_on_one_backend(cloud, launch, tmp_path):
    launch("tpu_vm")
    with pytest.raises(ConfigError, match="launched on tpu_vm, not on gke"):
        launch("gke")
    record = tmp_path / "run" / "launch.json"
    record.write_text("{}")
    with pytest.raises(ConfigError, match="is not what `diloco launch` wrote"):
        launch("tpu_vm")


def test_what_was_made_is_on_record_before_it_is_made(cloud, launch, tmp_path):
    cloud.fail("compute disks create", 1, "no")
    assert launch("tpu_vm") == 1
    record = json.loads((tmp_path / "run" / "launch.json").read_text())
    made = [entry["what"] for entry in record["made"]]
    assert made[-1] == "disk two-coordinator in us-east5-a"
    cloud.fail("", 0, "")
    assert launch("tpu_vm", "delete", disk=True) == 0
    assert cloud.things == {}


def test_what_another_config_made_is_named(cloud, launch, capsys):
    launch("tpu_vm")
    zones = {"v5p": "us-central1-a", "v6e.b": "us-east5-b"}
    capsys.readouterr()
    launch("tpu_vm", zones=zones)
    said = [s for s in capsys.readouterr().err.splitlines() if "# left over" in s]
    assert len(said) == 1
    assert "slice two-v5p (v5p:2x2x2) in us-east5-a" in said[0]
    assert "delete two-v5p --zone=us-east5-a --force" in said[0]


def test_certificates_of_ones_own_get_the_coordinators_name(cloud, config, tmp_path):
    from cryptography import x509

    from diloco_jax.wire.certificates import make_certificates

    folder = tmp_path / "own"
    make_certificates(folder, ["somewhere.else"], days=60)
    authority = (folder / "ca.pem").read_bytes()
    placement = dataclasses.replace(config.placement, certificates=str(folder))
    config = dataclasses.replace(config, placement=placement)
    options = LaunchOptions(on="tpu_vm", yes=True)
    assert run(config, "two.py", options) == 0
    pem = (folder / "coordinator.pem").read_bytes()
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    known = names.value.get_values_for_type(x509.DNSName)
    assert "somewhere.else" in known
    assert "two-coordinator.us-east5-a.c.my-project.internal" in known
    assert (folder / "ca.pem").read_bytes() == authority
    assert run(config, "two.py", options) == 0
    assert (folder / "coordinator.pem").read_bytes() == pem
