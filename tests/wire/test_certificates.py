"""`diloco certs`: what is made, added, renewed and revoked, and what is not.

A stolen key is shut out though its certificate was renewed since: what an authority has
signed is listed until it ends.
"""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509

from diloco_jax import cli
from diloco_jax.wire import certificates, peers, tls
from diloco_jax.wire.certificates import ISSUED, coordinator_names
from diloco_jax.wire.errors import Refused, SecurityError
from diloco_jax.wire.peers import COORDINATOR, OPERATOR, READER, island

A = island("a")
LOCAL = ["localhost", "127.0.0.1", "::1"]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "certificates"
    certificates.make_certificates(made, [], 90, islands=["a", "b"])
    return made


@pytest.fixture
def certs(capsys):
    """Runs `diloco certs`; returns its exit code and what it says."""

    def run(*arguments):
        code = cli.main(["certs", *map(str, arguments)])
        return code, capsys.readouterr().err

    return run


def pem_of(folder, who=A):
    return (folder / f"{who.stem}.pem").read_bytes()


def serial_of(pem):
    return x509.load_pem_x509_certificate(pem).serial_number


def gets_in(folder, pem):
    """As a coordinator with this folder decides."""
    try:
        tls.Peers(folder).identify(pem)
    except Refused:
        return False
    return True


def test_certs_makes_adds_and_does_not_replace_by_accident(tmp_path, certs):
    folder = tmp_path / "certificates"
    code, told = certs(folder, "--hosts", "10.0.0.1")
    assert (code, coordinator_names(folder)) == (0, [*LOCAL, "10.0.0.1"])
    assert f"called {', '.join(LOCAL)}, 10.0.0.1, and of no island" in told
    authority = (folder / "ca.pem").read_bytes()
    code, told = certs(folder, "--hosts", "10.0.0.2")
    assert code == 2
    assert "--add" in told
    assert "--replace" in told
    assert certs(folder, "--hosts", "10.0.0.2", "--add")[0] == 0
    assert coordinator_names(folder) == [*LOCAL, "10.0.0.1", "10.0.0.2"]
    assert (folder / "ca.pem").read_bytes() == authority
    assert certs(folder, "--replace")[0] == 0
    assert (folder / "ca.pem").read_bytes() != authority
    (folder / "ca.key").unlink()
    code, told = certs(folder, "--add", "--hosts", "x")
    assert code == 2
    assert f"{folder / 'ca.key'}: No such file" in told


def test_names_are_added_to_what_is_there(tmp_path, certs):
    folder = tmp_path / "nosuch"
    code, told = certs(folder, "--hosts", "a", "--add")
    assert code == 2
    assert f"({folder / 'ca.pem'}: No such file or directory)" in told
    assert "without --add it makes a new authority" in told
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--days", "-5"], ["--days -5", "1 day", "3650 days"]),
        (["--days", "0"], ["--days 0", "1 day"]),
        (["--days", "3651"], ["--days 3651", "3650"]),
        (["--islands", "a:b"], ["island name 'a:b'", "rename it"]),
        (["--hosts", "bad name!"], ["'bad name!'", "letters, digits"]),
        (["--hosts", ""], ["name ''", "as islands dial it"]),
        (["--hosts", "a..b"], ["'a..b'"]),
        (["--hosts", "x" * 64], ["x" * 64]),
        (["--revoke", "x", "--add"], ["choose one of them"]),
    ],
)
def test_certificates_that_would_not_do_are_not_made(tmp_path, certs, arguments, shown):
    folder = tmp_path / "certificates"
    code, told = certs(folder, *arguments)
    assert code == 2
    assert told.startswith("error: ")
    assert all(text in told for text in shown)
    assert not folder.exists()


def test_certificates_need_a_folder_that_can_be_made(tmp_path, certs):
    (tmp_path / "file").write_text("")
    code, told = certs(tmp_path / "file" / "in", "--hosts", "a.b-c")
    assert code == 2
    assert f"cannot write certificates to {tmp_path / 'file' / 'in'}: " in told
    assert "give a folder" in told


def test_islands_and_workers_get_keys_of_their_own_at_once_and_later(tmp_path, certs):
    folder = tmp_path / "certificates"
    code, told = certs(folder, "--islands", "v5p", "v6e.b", "--workers", "2")
    assert code == 0
    assert "and of islands v5p, v6e.b." in told
    before = {path.name: path.read_bytes() for path in folder.glob("*.pem")}
    code, told = certs(folder, "--add", "--islands", "late", "v6e.b", "--workers", "3")
    assert code == 0
    assert "and of islands late, v5p, v6e.b." in told
    after = {path.name: path.read_bytes() for path in folder.glob("*.pem")}
    kept = {name for name, content in before.items() if after[name] == content}
    assert {"island.v5p.pem", "coordinator.pem", "ca.pem"} < kept
    assert "island.v6e.b.pem" not in kept
    assert set(after) - set(before) == {"island.late.pem", "worker.2.pem"}
    assert certs(folder, "--add", "--hosts", "10.0.0.5")[0] == 0
    worker = certificates.certificate_of(folder, peers.worker(1))
    assert worker.public_bytes is not None
    names = worker.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert "10.0.0.5" in str(list(names.value)), "it is where the coordinator is"


def test_a_revoked_certificate_is_listed_and_gone(folder, certs):
    stolen = pem_of(folder)
    code, told = certs(folder, "--revoke", "island.a", "island.c")
    assert code == 2
    assert "--revoke island.c" in told
    assert (folder / "island.a.pem").exists()
    code, told = certs(folder, "--revoke", "island.a")
    assert code == 0
    assert f"serial numbers in hex {serial_of(stolen):x}, in {folder}" in told
    assert not list(folder.glob("island.a.*"))
    (line,) = (folder / "revoked.txt").read_text().splitlines()
    assert "# island a, " in line
    assert not gets_in(folder, stolen)
    # After somebody has edited the list.
    other, path = pem_of(folder, island("b")), folder / "revoked.txt"
    path.write_text(path.read_text().removesuffix("\n"))
    assert certs(folder, "--revoke", "island.b")[0] == 0
    assert not gets_in(folder, stolen)
    assert not gets_in(folder, other)


def test_a_certificate_that_was_renewed_is_revoked_with_the_newest(folder):
    """Though its files are no longer here."""
    stolen, other = pem_of(folder), pem_of(folder, island("b"))
    certificates.add(folder, [], 90, islands=["a"])
    assert certificates.renew(folder, 180, 365)
    newest = pem_of(folder)
    assert gets_in(folder, stolen)
    for file in folder.glob("island.a.*"):
        file.unlink()
    revoked = certificates.revoke(folder, A)
    assert len(revoked) == 3
    assert {serial_of(stolen), serial_of(newest)} < set(revoked)
    assert not gets_in(folder, stolen)
    assert not gets_in(folder, newest)
    assert gets_in(folder, other)
    # It comes back with another key, and is shut out again.
    certificates.add(folder, [], 90, islands=["a"])
    assert gets_in(folder, again := pem_of(folder))
    assert certificates.revoke(folder, A) == [serial_of(again)]
    text = (folder / certificates.REVOKED).read_text()
    assert certificates.serials(text) == [*revoked, serial_of(again)], "each once"
    with pytest.raises(SecurityError, match="of island a that gets in; it has coordin"):
        certificates.revoke(folder, A)


def test_a_coordinator_that_was_shut_out_gets_another_key(folder):
    stolen, names = pem_of(folder, COORDINATOR), coordinator_names(folder)
    certificates.revoke(folder, COORDINATOR)
    assert not (folder / "coordinator.key").exists()
    assert not gets_in(folder, stolen)
    certificates.add(folder, ["10.0.0.7"], 90)
    assert gets_in(folder, pem_of(folder, COORDINATOR))
    assert coordinator_names(folder) == [*names, "10.0.0.7"]


def test_a_list_that_is_missing_or_damaged_is_named(folder):
    with (folder / ISSUED).open("a") as file:
        file.write("7 tomorrow island.a\n")
    with pytest.raises(SecurityError, match=r"issued\.txt, line 6: '7 tomorrow"):
        certificates.revoke(folder, A)
    assert not (folder / certificates.REVOKED).exists()
    (folder / ISSUED).unlink()
    with pytest.raises(
        SecurityError, match=r"issued\.txt cannot .*No such file.*--repl"
    ):
        certificates.add(folder, [], 90)
    certificates.make_certificates(folder, [], 90, replace=True)
    assert len(certificates.issued(folder)) == 3


def test_certificates_that_have_ended_are_not_kept(folder):
    ended = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=1)
    with (folder / ISSUED).open("a") as file:
        file.write(f"7 {ended.isoformat()} {A.stem}\n")
    assert 7 not in {one.serial for one in certificates.issued(folder)}
    certificates.add(folder, [], 90, islands=["a"])
    lines = (folder / ISSUED).read_text().splitlines()
    assert not any(line.startswith("7 ") for line in lines)
    stems = [one.stem for one in certificates.issued(folder)]
    assert (stems.count(A.stem), stems.count(COORDINATOR.stem)) == (2, 1)


def test_only_what_ends_soon_is_renewed(folder):
    certificates.add(folder, [], 100, islands=["lasting"])
    before = {path.name: path.read_bytes() for path in folder.glob("*.pem")}
    renewed = certificates.renew(folder, 95, within_days=95)
    assert renewed == [COORDINATOR, A, island("b"), OPERATOR, READER]
    after = {path.name: path.read_bytes() for path in folder.glob("*.pem")}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"{who.stem}.pem" for who in renewed}
    assert certificates.renew(folder, 90, within_days=92) == []
    left = certificates.certificate_of(folder, READER).not_valid_after_utc
    left_days = (left - datetime.datetime.now(datetime.UTC)).days
    assert left_days == 94


def test_private_keys_are_private(folder):
    keys = sorted(path.name for path in folder.glob("*.key"))
    stems = ["ca", "coordinator", "island.a", "island.b", "operator", "reader"]
    assert keys == [f"{stem}.key" for stem in stems]
    for name in keys:
        assert (folder / name).stat().st_mode & 0o777 == 0o600
