"""Certificates that end while a launched run goes on."""

import datetime
import tarfile

import fake_kubectl
import pytest
from cryptography import x509
from webhook import webhook

from diloco_jax.launch import certificates
from diloco_jax.launch.command import LaunchOptions, run
from diloco_jax.wire.certificates import revoke
from diloco_jax.wire.principal import island

SOON, LATE = 40, 60
"""Days left of certificates that are made anew, and of those that are not yet."""
STEMS = {
    "coordinator": "coordinator",
    "v5p": "island.v5p",
    "v6e-b": "island.v6e.b",
}
"""Stems of the certificates' files by the part of a secret's name."""


@pytest.fixture
def launched(launch, cloud, monkeypatch):
    """`launched("gke", 40)`: a launch whose certificates have so many days left."""

    def launched(on, days):
        with monkeypatch.context() as patch:
            patch.setattr(certificates, "DAYS", days)
            assert launch(on) == 0
        cloud.changes()

    return launched


def days_left(folder, stem):
    """Days until the certificate in the machine's archive ends."""
    with tarfile.open(folder / f"{stem}.tar") as tar:
        text = tar.extractfile(f"{stem}.pem").read()
    end = x509.load_pem_x509_certificate(text).not_valid_after_utc
    return (end - datetime.datetime.now(datetime.UTC)).days


def carried(cloud):
    """Names of the secrets that got another content since the last look."""
    calls = cloud.changes()
    added = [c[4] for c in calls if c[:4] == ["gcloud", "secrets", "versions", "add"]]
    words = ["kubectl", "create", "secret", "generic"]
    return added + [c[4] for c in calls if c[:4] == words]


def secrets(*parts):
    return [f"two-{part}-certificates" for part in parts or STEMS]


def end(cloud, on):
    cloud.complete() if on == "gke" else cloud.say_last("done")


@pytest.mark.parametrize("on", ["tpu_vm", "gke"])
def test_create_renews_what_ends_soon(cloud, launch, launched, tmp_path, on):
    launched(on, SOON)
    assert launch(on) == 0
    assert sorted(carried(cloud)) == secrets()
    for stem in STEMS.values():
        assert days_left(tmp_path / "run/certificates", stem) == certificates.DAYS - 1


@pytest.mark.parametrize("on", ["tpu_vm", "gke"])
def test_a_watch_renews_what_ends_soon_and_carries_it_once(
    cloud, launched, act, tmp_path, on
):
    launched(on, SOON)
    folder = tmp_path / "run/certificates"

    def look():
        assert sorted(carried(cloud)) == secrets()
        for stem in STEMS.values():
            assert days_left(folder, stem) == certificates.DAYS - 1

    def again():
        assert carried(cloud) == []
        end(cloud, on)

    assert act(on, "watch", then=[look, again]) == 0


def test_a_watch_leaves_what_ends_late(cloud, launched, act, tmp_path):
    launched("tpu_vm", LATE)
    before = (tmp_path / "run/certificates/island.v5p.key").read_bytes()

    def look():
        assert carried(cloud) == []
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0
    assert (tmp_path / "run/certificates/island.v5p.key").read_bytes() == before


def test_a_secret_that_does_not_take_it_gets_it_later(cloud, launched, act, capsys):
    launched("tpu_vm", SOON)
    cloud.fail("secrets versions add", 1, "no route to host")

    def put_right():
        assert "no route to host" in capsys.readouterr().err
        assert "versions" not in cloud.things["secret"]["two-v5p-certificates"]
        cloud.changes()
        cloud.fail("", 0, "")

    def look():
        assert sorted(carried(cloud)) == secrets()
        assert cloud.things["secret"]["two-v5p-certificates"]["versions"] == 2
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[put_right, look]) == 0


def test_a_secret_of_gke_that_was_deleted_only_is_made_again(cloud, launched, act):
    """Its content is replaced by two commands; the second one may fail."""
    launched("gke", SOON)
    cloud.fail("kubectl create", 1, "no route to host")

    def put_right():
        assert not [key for key in cloud.objects if "certificates" in key]
        cloud.fail("", 0, "")

    def look():
        there = [key for key in cloud.objects if "certificates" in key]
        assert sorted(there) == [f"secret/{name}" for name in secrets()]
        cloud.complete()

    assert act("gke", "watch", then=[put_right, look]) == 0


def test_a_watch_that_died_between_the_two_commands_is_taken_up(
    cloud, launched, act, monkeypatch
):
    class GoneError(Exception):
        """As if the watch's own machine had died."""

    launched("gke", SOON)
    kubectl = fake_kubectl.main

    def die_after(arguments):
        code = kubectl(arguments)
        if arguments[:2] == ["delete", "secret"]:
            raise GoneError
        return code

    with monkeypatch.context() as patch:
        patch.setattr(fake_kubectl, "main", die_after)
        with pytest.raises(GoneError):
            act("gke", "watch")
    there = [key for key in cloud.objects if "certificates" in key]
    assert len(there) == len(STEMS) - 1

    def look():
        there = [key for key in cloud.objects if "certificates" in key]
        assert sorted(there) == [f"secret/{name}" for name in secrets()]
        cloud.complete()

    assert act("gke", "watch", then=[look]) == 0


def test_a_secret_that_a_person_deleted_is_not_made_again(cloud, launched, act):
    launched("tpu_vm", SOON)
    cloud.lose("secret", "two-v5p-certificates")

    def look():
        assert sorted(carried(cloud)) == secrets("coordinator", "v6e-b")
        assert "two-v5p-certificates" not in cloud.things["secret"]
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


def test_a_watch_carries_a_revocation_and_makes_no_other_key(
    cloud, launched, act, tmp_path
):
    launched("tpu_vm", LATE)
    folder = tmp_path / "run/certificates"
    revoke(folder, island("v5p"))

    def look():
        assert carried(cloud) == secrets("coordinator")
        assert not (folder / "island.v5p.key").exists()
        with tarfile.open(folder / "coordinator.tar") as tar:
            assert "revoked.txt" in tar.getnames()
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


DAY_S = 86400.0
WITHOUT_KEY = "are not renewed: cannot add to the certificates in"
ALARM = "ALARM: THE LAUNCH'S CERTIFICATES END IN"


def test_what_cannot_be_renewed_is_an_alert_from_14_days_before_the_end(
    cloud, launched, act, tmp_path, monkeypatch, capsys
):
    launched("tpu_vm", 14)
    (tmp_path / "run/certificates/ca.key").unlink()
    now = [1_800_000_000.0]
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: now[0])

    def tomorrow():
        now[0] += DAY_S

    with webhook() as hook:
        then = [lambda: None, tomorrow, lambda: cloud.say_last("done")]
        assert act("tpu_vm", "watch", then=then, alert_url=hook.url) == 0
    said = capsys.readouterr().err.splitlines()
    told = [line for line in said if line.startswith(ALARM)]
    assert len(told) == 2  # Once a day.
    assert "ca.key: No such file" in told[0]
    sent = [alert for message in hook.posted for alert in message["alerts"]]
    assert any(alert.startswith(f"{ALARM} 13 DAYS") for alert in sent)


@pytest.mark.parametrize("days", [16, SOON])
def test_what_cannot_be_renewed_is_a_note_before_that(
    cloud, launched, act, tmp_path, capsys, days
):
    launched("tpu_vm", days)
    (tmp_path / "run/certificates/ca.key").unlink()
    then = [lambda: None, lambda: cloud.say_last("done")]
    with webhook() as hook:
        assert act("tpu_vm", "watch", then=then, alert_url=hook.url) == 0
    said = capsys.readouterr().err.splitlines()
    (note,) = [line for line in said if WITHOUT_KEY in line]
    assert note.startswith(f"note: certificates, which end in {days - 1} days,")
    assert hook.posted == []


def test_a_watch_without_the_certificates_says_that_nobody_renews_them(
    cloud, launched, act, tmp_path, capsys
):
    launched("tpu_vm", SOON)
    folder = tmp_path / "run/certificates"
    folder.rename(tmp_path / "elsewhere")

    def look():
        assert carried(cloud) == []
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0
    (note,) = [n for n in capsys.readouterr().err.splitlines() if "not renewed" in n]
    assert f"{folder} has none of them" in note


def test_a_damaged_certificate_ends_no_watch(cloud, launched, act, tmp_path, capsys):
    launched("tpu_vm", LATE)
    (tmp_path / "run/certificates/island.v5p.pem").write_text("nonsense")

    def look():
        assert carried(cloud) == []
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0
    assert f"{ALARM} 0 DAYS" in capsys.readouterr().err


def test_a_dry_run_renews_nothing(cloud, launched, launch, config, tmp_path):
    launched("tpu_vm", SOON)
    before = (tmp_path / "run/certificates/island.v5p.pem").read_bytes()
    options = LaunchOptions(on="tpu_vm", action="watch", dry_run=True)
    assert run(config, "two.py", options) == 0
    assert (tmp_path / "run/certificates/island.v5p.pem").read_bytes() == before
