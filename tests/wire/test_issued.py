"""A stolen key is shut out though its certificate was renewed since: what an authority
has signed is listed until it ends."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509

from diloco_jax import cli
from diloco_jax.wire import certificates, principal
from diloco_jax.wire.certificates import ISSUED, Issued
from diloco_jax.wire.errors import Refused, SecurityError
from diloco_jax.wire.principal import COORDINATOR, island

A = island("a")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "certificates"
    certificates.make_certificates(made, [], 90, islands=["a", "b"])
    return made


def pem_of(folder, who=A):
    return (folder / f"{who.stem}.pem").read_bytes()


def serial_of(pem):
    return x509.load_pem_x509_certificate(pem).serial_number


def gets_in(folder, pem):
    """As a coordinator with this folder decides."""
    try:
        principal.Peers(folder).identify(pem)
    except Refused:
        return False
    return True


def test_a_certificate_that_was_renewed_is_revoked_with_the_newest(folder):
    stolen, other = pem_of(folder), pem_of(folder, island("b"))
    certificates.add(folder, [], 90, islands=["a"])
    assert certificates.renew(folder, 180, 365)
    newest = pem_of(folder)
    assert gets_in(folder, stolen)
    revoked = certificates.revoke(folder, A)
    assert len(revoked) == 3
    assert {serial_of(stolen), serial_of(newest)} < set(revoked)
    assert not gets_in(folder, stolen)
    assert not gets_in(folder, newest)
    assert gets_in(folder, other)


def test_it_comes_back_with_another_key_and_is_shut_out_again(folder):
    first = certificates.revoke(folder, A)
    certificates.add(folder, [], 90, islands=["a"])
    assert gets_in(folder, again := pem_of(folder))
    assert certificates.revoke(folder, A) == [serial_of(again)]
    text = (folder / principal.REVOKED).read_text()
    assert principal.serials(text) == [*first, serial_of(again)], "each once"
    with pytest.raises(SecurityError, match="of island a that gets in; it has coordin"):
        certificates.revoke(folder, A)


def test_a_key_that_is_no_longer_here_is_revoked_all_the_same(folder, capsys):
    stolen = pem_of(folder)
    for file in folder.glob("island.a.*"):
        file.unlink()
    assert cli.main(["certs", str(folder), "--revoke", "island.a"]) == 0
    told = capsys.readouterr().err
    assert f"serial numbers in hex {serial_of(stolen):x}, in {folder}" in told
    assert "warning" not in told
    assert not gets_in(folder, stolen)


def test_a_folder_without_its_list_is_not_added_to(folder):
    (folder / ISSUED).unlink()
    for call in (
        lambda: certificates.add(folder, [], 90),
        lambda: certificates.revoke(folder, A),
    ):
        with pytest.raises(SecurityError, match=r"issued\.txt is no .*--replace"):
            call()
    certificates.make_certificates(folder, [], 90, replace=True)
    assert len(certificates.issued(folder)) == 3


def test_certificates_that_have_ended_are_not_kept(folder):
    now = datetime.datetime.now(datetime.UTC)
    ended = Issued(7, now - datetime.timedelta(seconds=1), A.stem)
    with (folder / ISSUED).open("a") as file:
        file.write(f"{ended.serial:x} {ended.end.isoformat()} {ended.stem}\n")
    assert 7 not in {one.serial for one in certificates.issued(folder)}
    certificates.add(folder, [], 90, islands=["a"])
    lines = (folder / ISSUED).read_text().splitlines()
    assert not any(line.startswith("7 ") for line in lines)
    stems = [one.stem for one in certificates.issued(folder)]
    assert (stems.count(A.stem), stems.count(COORDINATOR.stem)) == (2, 1)


def test_a_damaged_list_is_named_with_its_line(folder):
    with (folder / ISSUED).open("a") as file:
        file.write("7 tomorrow island.a\n")
    with pytest.raises(SecurityError, match=r"issued\.txt, line 6: '7 tomorrow"):
        certificates.revoke(folder, A)
    assert not (folder / principal.REVOKED).exists()
