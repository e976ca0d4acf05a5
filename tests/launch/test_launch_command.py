"""`diloco launch` as people meet it: dry runs, questions, refusals."""

import datetime
import io
import re
import shlex
import subprocess
import sys

import pytest
from cryptography import x509

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.launch.command import LaunchOptions, run
from diloco_jax.launch.spec import WORKDIR
from diloco_jax.wire.certificates import add, coordinator_names, make_certificates
from diloco_jax.wire.errors import SecurityError

BACKENDS = ("tpu_vm", "gke")


@pytest.fixture
def path(config, tmp_path):
    """A configs file on disk."""
    write_config_json(config, tmp_path / "two.json")
    return str(tmp_path / "two.json")


@pytest.mark.parametrize("on", BACKENDS)
def test_a_dry_run_writes_files_and_prints_lines_that_the_tools_take(
    on, cloud, path, tmp_path, capsys
):
    assert cli.main(["launch", path, "--on", on, "--dry-run"]) == 0
    assert cloud.calls == []
    shown = capsys.readouterr()
    assert "dry run: nothing was asked" in shown.err
    files = sorted(file.name for file in (tmp_path / "run/launch").iterdir())
    assert len(files) == {"tpu_vm": 4, "gke": 7}[on]
    assert all(f"written: {tmp_path}/run/launch/{name}" in shown.err for name in files)
    # No key is made, and nothing counts as launched.
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == ["launch"]
    assert cli.main(["launch", path, "--on", on, "--yes"]) == 0
    assert "dry run" not in capsys.readouterr().err
    dry = [line for line in shown.out.splitlines() if "get-credentials" not in line]
    done = [shlex.join(call) for call in cloud.changes()]
    # Nothing is packed yet, so nobody knows its digest.
    digest = r"diloco-content=\w{32}"
    assert [re.sub(digest, "", line) for line in dry] == [
        re.sub(digest, "", line) for line in done
    ]


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


def test_people_are_asked(cloud, config, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    options = LaunchOptions(on="tpu_vm")
    for answer, made in (("n\n", False), ("\n", False), ("y\n", True)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert run(config, "two.py", options) == 0
        assert bool(cloud.things) == made
    assert "run these 16 commands? [y/N]" in capsys.readouterr().err


def test_settings_can_be_given_on_the_command_line(cloud, path, tmp_path, capsys):
    line = (
        f"launch {path} --on tpu_vm --dry-run --launch.project other-project "
        f"--launch.purchase.v6e.b reserved --workdir {tmp_path}/there"
    )
    assert cli.main(line.split()) == 0
    out = capsys.readouterr().out
    assert out.count("--project=other-project") == 16
    assert "--reserved" in out
    assert (tmp_path / "there/launch/coordinator.sh").is_file()


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
    ("on", "islands", "coordinator", "told"),
    [
        ("tpu_vm", "", "", ["service_account is empty", "act as one account"]),
        ("tpu_vm", "i@p.iam", "", ["act as one account"]),
        ("gke", "i@p.iam", "i@p.iam", ["act as one account"]),
        ("gke", "i@p.iam", "c@p.iam", []),
        ("sky", "i@p.iam", "c@p.iam", ["act as skypilot-v1@my-project.iam"]),
    ],
)
def test_accounts_that_may_do_too_much_are_told(
    cloud, launch, capsys, on, islands, coordinator, told
):
    accounts = {"service_account": islands, "coordinator_account": coordinator}
    place = (
        {"coordinator_address": "c.internal", "dns_zone": "z"} if on == "sky" else {}
    )
    assert launch(on, **accounts, **place) == 0
    lines = capsys.readouterr().err.splitlines()
    notes = [line for line in lines if line.startswith("note: ") and "account" in line]
    assert len(notes) == len(told)
    assert all(text in note for text, note in zip(told, notes, strict=True))


GONE = "snapshots and checkpoints are gone with the container"
PLACES = [
    ("gke", "placement.checkpoints", "", None),
    ("tpu_vm", "placement.checkpoints", "gs://b/run", None),
    ("gke", "placement.checkpoints", "s3://b/run", None),
    ("gke", "placement.checkpoints", "/disk/run", GONE),
    ("tpu_vm", "placement.checkpoints", "kept", GONE),
    # The coordinator's disk is mounted there, and no island's.
    (
        "gke",
        "placement.checkpoints",
        f"{WORKDIR}/kept",
        "islands' checkpoints are gone",
    ),
    ("gke", "launch.zones", {"v5p": "us-east5-a", "v6e.b": "us-east5-b"}, None),
    (
        "gke",
        "launch.zones",
        {"v5p": "us-east5-a,us-east5-q", "v6e.b": "us-east5-b"},
        "v5p has us-east5-q, and v5p is known to be offered in us-central1-a, us-east5",
    ),
]


@pytest.mark.parametrize(("on", "field", "value", "said"), PLACES)
def test_places_that_are_doubtful_are_told(config, capsys, on, field, value, said):
    options = LaunchOptions(on=on, dry_run=True, unplanned=True)
    assert run(config.replace(field, value), "two.py", options) == 0
    lines = capsys.readouterr().err.splitlines()
    notes = [line for line in lines if line.startswith(f"note: {field}")]
    assert len(notes) == (said is not None)
    assert all(said in note for note in notes)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (FileNotFoundError(), ["gcloud is not on this machine; install"]),
        (
            subprocess.TimeoutExpired("gcloud", 120),
            ["did not end within 120 s", "it takes up what is there"],
        ),
    ],
)
def test_a_tool_that_is_missing_or_hangs_is_named(
    config, monkeypatch, capsys, failure, said
):
    def call(*_, **given):
        assert given["timeout"] == 120
        raise failure

    monkeypatch.setattr("diloco_jax.launch.submit.subprocess.run", call)
    assert run(config, "two.py", LaunchOptions(on="tpu_vm", yes=True)) == 1
    told = capsys.readouterr().err
    assert all(text in told for text in said)


def test_the_price_is_told_before_anything_is_asked(cloud, launch, capsys):
    prices = "v5p=4,v6e=2,coordinator=1"
    assert launch("gke", price=prices, max_hours=10.0) == 0
    said = capsys.readouterr().err
    # 8 and 16 chips.
    assert "price per hour: 65.00" in said
    assert "launch.max_hours: 10 hours, 650.00 at that price; at the end of the" in said
    with pytest.raises(ConfigError, match="lacks coordinator, v6e"):
        launch("gke", price="v5p=4")
    launch("gke", "run")
    assert "price per hour: unknown, give --price" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_hours", "lasting", "kept", "renewed"),
    # Those of 36 hours and a day's linger, rounded up to days, with a margin.
    [(36.0, 17, 11, 10), (0.0, 365, 183, 182)],
)
def test_certificates_last_as_long_as_the_run_may_and_a_margin(
    cloud, launch, tmp_path, max_hours, lasting, kept, renewed
):
    folder = tmp_path / "run/certificates"

    def days():
        pem = (folder / "island.v5p.pem").read_bytes()
        ends = x509.load_pem_x509_certificate(pem).not_valid_after_utc
        left = ends - datetime.datetime.now(datetime.UTC)
        return round(left / datetime.timedelta(days=1))

    assert launch("gke", max_hours=max_hours) == 0
    assert days() == lasting
    for before, after in ((kept, kept), (renewed, lasting)):
        add(folder, [], before)
        assert launch("gke", "run", max_hours=max_hours) == 0
        assert days() == after


def test_a_damaged_certificate_is_refused(cloud, launch, tmp_path):
    assert launch("gke") == 0
    (tmp_path / "run/certificates/coordinator.pem").write_text("damaged")
    with pytest.raises(SecurityError, match=r"coordinator.pem cannot be read .* anoth"):
        launch("gke")


def test_certificates_of_ones_own_get_the_coordinators_name(cloud, config, tmp_path):
    folder = tmp_path / "own"
    make_certificates(folder, ["somewhere.else"], days=60)
    authority = (folder / "ca.pem").read_bytes()
    config = config.replace("certificates", str(folder))
    options = LaunchOptions(on="tpu_vm", yes=True)
    assert run(config, "two.py", options) == 0
    pem = (folder / "coordinator.pem").read_bytes()
    known = coordinator_names(folder)
    assert "somewhere.else" in known
    assert "two-coordinator.us-east5-a.c.my-project.internal" in known
    assert (folder / "ca.pem").read_bytes() == authority
    assert run(config, "two.py", options) == 0
    assert (folder / "coordinator.pem").read_bytes() == pem
