"""`diloco certs`: what it makes, and what it does not."""

import pytest
from cryptography import x509

from diloco_jax import cli


def test_certs_makes_adds_and_does_not_replace_by_accident(tmp_path, capsys):
    folder = tmp_path / "certificates"
    assert cli.main(["certs", str(folder), "--hosts", "10.0.0.1"]) == 0
    local = "called localhost, 127.0.0.1, ::1"
    assert f"{local}, 10.0.0.1, and of no island" in capsys.readouterr().err
    authority = (folder / "ca.pem").read_bytes()
    assert cli.main(["certs", str(folder), "--hosts", "10.0.0.2"]) == 2
    assert "--add" in capsys.readouterr().err
    assert cli.main(["certs", str(folder), "--hosts", "10.0.0.2", "--add"]) == 0
    assert f"{local}, 10.0.0.1, 10.0.0.2, and of no island" in capsys.readouterr().err
    assert (folder / "ca.pem").read_bytes() == authority


def test_names_are_added_to_what_is_there(tmp_path, capsys):
    folder = tmp_path / "nosuch"
    assert cli.main(["certs", str(folder), "--hosts", "a", "--add"]) == 2
    message = capsys.readouterr().err
    assert f"({folder / 'ca.pem'}: No such file or directory)" in message
    assert "without --add it makes a new authority" in message
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
    ],
)
def test_certificates_that_would_not_do_are_not_made(
    tmp_path, capsys, arguments, shown
):
    folder = tmp_path / "certificates"
    assert cli.main(["certs", str(folder), *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    for text in shown:
        assert text in message
    assert not folder.exists()


def test_certificates_need_a_folder_that_can_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["certs", str(tmp_path / "file" / "in"), "--hosts", "a.b-c"]) == 2
    message = capsys.readouterr().err
    assert f"cannot write certificates to {tmp_path / 'file' / 'in'}: " in message
    assert "give a folder" in message


def test_islands_get_keys_of_their_own_when_the_authority_is_made_and_later(
    tmp_path, capsys
):
    folder = tmp_path / "certificates"
    assert cli.main(["certs", str(folder), "--islands", "v5p", "v6e.b"]) == 0
    assert "and of islands v5p, v6e.b." in capsys.readouterr().err
    coordinator = (folder / "coordinator.pem").read_bytes()
    first = (folder / "island.v5p.pem").read_bytes()
    assert cli.main(["certs", str(folder), "--add", "--islands", "late", "v6e.b"]) == 0
    assert "and of islands late, v5p, v6e.b." in capsys.readouterr().err
    assert (folder / "island.v5p.pem").read_bytes() == first
    assert (folder / "coordinator.pem").read_bytes() == coordinator


def test_a_revoked_certificate_is_listed_and_gone(tmp_path, capsys):
    folder = tmp_path / "certificates"
    assert cli.main(["certs", str(folder), "--islands", "a", "b"]) == 0
    capsys.readouterr()
    assert cli.main(["certs", str(folder), "--revoke", "island.a", "island.c"]) == 2
    assert "'island.c'" in (told := capsys.readouterr().err) or "island.c" in told
    assert (folder / "island.a.pem").exists()
    assert cli.main(["certs", str(folder), "--revoke", "island.a"]) == 0
    assert "revoked.txt" in capsys.readouterr().err
    assert not (folder / "island.a.pem").exists()
    assert not (folder / "island.a.key").exists()
    (line,) = (folder / "revoked.txt").read_text().splitlines()
    assert "# island a, " in line
    assert cli.main(["certs", str(folder), "--revoke", "x", "--add"]) == 2
    assert "choose one of them" in capsys.readouterr().err


def test_workers_get_keys_of_their_own_and_the_coordinators_names(tmp_path, capsys):
    folder = tmp_path / "certs"
    assert cli.main(["certs", str(folder), "--workers", "2"]) == 0
    first = (folder / "worker.0.pem").read_bytes()
    assert not (folder / "worker.2.pem").exists()
    added = ["certs", str(folder), "--add", "--hosts", "10.0.0.5"]
    assert cli.main(added) == 0, "a worker is reached where the coordinator is"
    assert (folder / "worker.0.pem").read_bytes() != first
    assert "10.0.0.5" in str(certificate_names(folder / "worker.1.pem"))
    assert cli.main(["certs", str(folder), "--add", "--workers", "3"]) == 0
    assert (folder / "worker.2.key").exists()
    capsys.readouterr()


def certificate_names(path):
    """The names of machines in a certificate."""
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(entry.value) for entry in known.value]
