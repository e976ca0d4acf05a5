"""Make a run's own certificate authority, and a certificate for each of its principals.

Folder: `ca.pem`, `ca.key` (needed only to add more; keep it off all other machines),
and STEM.pem and STEM.key of the coordinator, of its workers (`worker.NUMBER`), of each
island (`island.NAME`), of readers and of operators. EC P-256 throughout. `revoked.txt`
lists what is shut out, and `issued.txt` what was signed: serial number in hex, end and
principal on each line. A certificate may be renewed and its file overwritten, yet
whoever copied the old one with its key gets in until it is revoked.

The command is `diloco certs DIR --hosts HOST... --islands NAME... [--add | --revoke
WHO...]`.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import io
import ipaddress
import os
import re
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_jax.config.config import check_name
from diloco_jax.config.fields import NOT_NEGATIVE, positional, setting
from diloco_jax.config.options import parse
from diloco_jax.errors import ConfigError, suggest
from diloco_jax.files import whole, write_text
from diloco_jax.wire.errors import SecurityError
from diloco_jax.wire.peers import (
    COORDINATOR,
    OPERATOR,
    READER,
    Principal,
    island,
    of_stem,
    worker,
)

REVOKED = "revoked.txt"
"""In the coordinator's folder: a serial number in hex per line, and what it was."""
ISSUED = "issued.txt"


class Issued(NamedTuple):
    """A certificate that was signed."""

    serial: int
    end: datetime.datetime
    stem: str
    """The principal's, see `Principal.stem`."""


def issued(folder: Path) -> list[Issued]:
    """Return the certificates that the folder's authority has signed and that have not
    ended, oldest first. Raises SecurityError if its list of them cannot be read."""
    path, found = folder / ISSUED, list[Issued]()
    if not (folder / "ca.pem").exists():
        return []
    where = str(path)
    try:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path}, line {number}: {line!r}"
            serial, end, stem = line.split()
            ends = datetime.datetime.fromisoformat(end)
            found.append(Issued(int(serial, 16), ends, stem))
        now = datetime.datetime.now(datetime.UTC)
        return [one for one in found if one.end > now]
    except OSError as error:
        raise SecurityError(
            f"{path} cannot be read ({error.strerror}); copy it with the authority, or "
            f"replace that (`diloco certs --replace`)"
        ) from error
    except (ValueError, TypeError) as error:
        raise SecurityError(
            f"{where} is no serial number, end and owner of a certificate ({error}); "
            f"restore the file, or replace the authority (`diloco certs --replace`)"
        ) from error


ENDINGS = (".key", ".pem")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
CA_DAYS = 3650
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_NAME = re.compile(rf"(\*\.)?{LABEL}(\.{LABEL})*\.?")


def make_certificates(
    folder: str | Path,
    names: Iterable[str],
    days: int,
    *,
    islands: Iterable[str] = (),
    workers: int = 0,
    replace: bool = False,
) -> None:
    """Write a new authority and its certificates, valid for `days`.

    Args:
      names: host names and IP addresses at which islands reach the coordinator.
      islands: names of the islands.
      workers: number of the coordinator's workers, which are reached by its names.
      replace: replace an authority that the folder has.

    Raises SecurityError if the folder has an authority already, unless `replace`.
    """
    folder = Path(folder)
    if (folder / "ca.pem").exists() and not replace:
        raise SecurityError(
            f"{folder / 'ca.pem'} exists: a new authority would shut out every process "
            f"that has certificates of the old one; add to it (`diloco certs --add`), "
            f"choose another folder, or replace it on purpose (`diloco certs "
            f"--replace`)"
        )
    authority = _sign("diloco authority", CA_DAYS)
    wanted = [COORDINATOR, READER, OPERATOR, *map(island, islands)]
    wanted += map(worker, range(workers))
    leaves = _leaves(authority, wanted, [*LOCAL_NAMES, *names], days)
    if replace:
        # What another authority signed, and its lists.
        gone = [f"{who.stem}{end}" for who in principals(folder) for end in ENDINGS]
        for name in (*gone, REVOKED, ISSUED):
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, [], {**leaves, "ca": authority})


def add(
    folder: str | Path,
    names: Iterable[str],
    days: int,
    *,
    islands: Iterable[str] = (),
    workers: int = 0,
) -> None:
    """Sign certificates anew: those of the coordinator and its workers with further
    names, those of these islands and workers, or all of them if nothing is named. Those
    given out before stay valid.

    Raises SecurityError if the folder does not hold the authority with its key.
    """
    folder, further = Path(folder), list(names)
    here = principals(folder)
    serving = [who for who in here if _serves(who)] if further else []
    named = [*map(island, islands), *map(worker, range(workers))]
    _add(folder, list(dict.fromkeys([*serving, *named])) or here, days, further)


def renew(folder: str | Path, days: int, within_days: int) -> list[Principal]:
    """Sign anew, for `days` days, the certificates that end within `within_days` days.

    Returns whose they are. Raises SecurityError as `add` does.
    """
    folder = Path(folder)
    limit = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=within_days)
    ending = [
        who
        for who in principals(folder)
        if certificate_of(folder, who).not_valid_after_utc < limit
    ]
    if ending:
        _add(folder, ending, days)
    return ending


def _add(
    folder: Path, wanted: list[Principal], days: int, further: Iterable[str] = ()
) -> None:
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        hosts = [*coordinator_names(folder), *further]
        key = serialization.load_pem_private_key(
            (folder / "ca.key").read_bytes(), password=None
        )
    except (OSError, ValueError, TypeError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why = f"{error.filename}: {error.strerror}"
        raise SecurityError(
            f"cannot add to the certificates in {folder} ({why}); it needs ca.pem, "
            f"ca.key and coordinator.pem as `diloco certs` made them; without --add it "
            f"makes a new authority"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SecurityError(
            f"{folder / 'ca.key'} is no EC key; make a new authority with "
            f"`diloco certs --replace`"
        )
    leaves = _leaves(_Signed(authority, key), wanted, hosts, days)
    _write(folder, issued(folder), leaves)


def complete(
    folder: Path,
    hosts: Iterable[str],
    days: int,
    renew_within_days: int,
    *,
    islands: Sequence[str],
    workers: int,
) -> None:
    """Make what a folder lacks for a coordinator on `hosts`, these islands and workers,
    and STEM.tar of each one's files (`files_of`).

    What is there is kept, but for certificates that end within `renew_within_days`.
    Raises SecurityError if it cannot be completed.
    """
    if not (folder / "ca.pem").exists():
        make_certificates(folder, hosts, days, islands=islands, workers=workers)
    else:
        here, known = set(principals(folder)), coordinator_names(folder)
        lacking = [name for name in islands if island(name) not in here]
        new = workers if any(w not in here for w in map(worker, range(workers))) else 0
        missing = [host for host in hosts if host not in known]
        if missing or lacking or new:
            add(folder, missing, days, islands=lacking, workers=new)
        renew(folder, days, renew_within_days)
    for who in (COORDINATOR, *map(worker, range(workers)), *map(island, islands)):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name in files_of(folder, who.stem):
                entry = tarfile.TarInfo(name)
                content = (folder / name).read_bytes()
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))
        _replace(folder / f"{who.stem}.tar", packed.getvalue(), 0o600)


def files_of(folder: Path, stem: str) -> list[str]:
    """Name the files that a machine with the certificates of this stem gets: `ca.pem`,
    `STEM.pem`, `STEM.key`; and the list of revoked ones if there is one, unless it is
    an island's, which asks the coordinator."""
    owner = of_stem(stem)
    revoked = owner is not None and owner.role != "island"
    lists = [REVOKED] if revoked and (folder / REVOKED).exists() else []
    return ["ca.pem", f"{stem}.pem", f"{stem}.key", *lists]


def digest(folder: Path, stem: str) -> str:
    """Return a digest of STEM.tar that fits into a label; of nothing if there is
    none."""
    path = folder / f"{stem}.tar"
    packed = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(packed).hexdigest()[:32]


def revoke(folder: str | Path, who: Principal) -> list[int]:
    """Add all certificates of a principal that are still valid, renewed ones included,
    to the folder's `revoked.txt`; delete its files. Return their serial numbers.

    Raises SecurityError if there are none.
    """
    folder = Path(folder)
    known, path = issued(folder), folder / REVOKED
    before = path.read_text() if path.exists() else ""
    try:
        out = serials(before)
    except ValueError as error:
        raise SecurityError(f"{path} cannot be read ({error}); mend it") from error
    known = [one for one in known if one.serial not in out]
    found = [one.serial for one in known if one.stem == who.stem]
    if not found:
        others = ", ".join(sorted({one.stem for one in known})) or "none"
        raise SecurityError(
            f"{folder} has no certificate of {who} that gets in; it has {others}"
        )
    today = datetime.datetime.now(datetime.UTC).date()
    lines = "".join(f"{serial:x} # {who}, {today}\n" for serial in found)
    if before and not before.endswith("\n"):
        before += "\n"  # Somebody has edited it.
    _replace(path, f"{before}{lines}".encode(), 0o644)
    # A coordinator's certificate has the names that the next one is signed for.
    for ending in ENDINGS[: 1 if who == COORDINATOR else None]:
        (folder / f"{who.stem}{ending}").unlink(missing_ok=True)
    return found


def serials(text: str) -> list[int]:
    """Return the serial numbers in a `revoked.txt`. Raises ValueError, naming the line,
    if one is no number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        try:
            found += [int(words[0], 16)] if words else []
        except ValueError:
            raise ValueError(f"line {number}: {words[0]!r} is no hex number") from None
    return found


def principals(folder: str | Path) -> list[Principal]:
    """Return whose certificates a folder has, in order of their files' names."""
    stems = sorted(
        path.name.removesuffix(".pem") for path in Path(folder).glob("*.pem")
    )
    return [who for stem in stems if (who := of_stem(stem)) is not None]


def coordinator_names(folder: str | Path) -> list[str]:
    """Return the names and addresses of machines in the coordinator's certificate.
    Raises SecurityError if it cannot be read."""
    try:
        certificate = certificate_of(Path(folder), COORDINATOR)
        found = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise SecurityError(
            f"{Path(folder) / 'coordinator.pem'} cannot be read as a coordinator's "
            f"certificate ({error}); make a new authority in another folder"
        ) from error
    machines = (x509.DNSName, x509.IPAddress)
    return [str(entry.value) for entry in found.value if isinstance(entry, machines)]


def certificate_of(folder: Path, who: Principal) -> x509.Certificate:
    """Return a principal's certificate in a folder."""
    path = folder / f"{who.stem}.pem"
    return x509.load_pem_x509_certificate(path.read_bytes())


class _Signed(NamedTuple):
    """A certificate and the key that it is for."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _leaves(
    authority: _Signed, wanted: Iterable[Principal], hosts: Sequence[str], days: int
) -> dict[str, _Signed]:
    """Sign a certificate for each principal; return them by the stems of their files.
    hosts: names of the coordinator's machine."""
    machines, leaves = _hosts(hosts), dict[str, _Signed]()
    for who in wanted:
        # The coordinator's asks for the status, too, for people on its machine.
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(who.uri)]
        if _serves(who) or who.role == "island":
            # An island serves others of its region; with no machine in its certificate
            # it cannot stand for the coordinator.
            usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        if _serves(who):
            names += machines
        extensions = x509.ExtendedKeyUsage(usages), x509.SubjectAlternativeName(names)
        leaves[who.stem] = _sign(f"diloco {who}", days, authority, *extensions)
    return leaves


def _serves(who: Principal) -> bool:
    return who.role in ("coordinator", "worker")


def _sign(
    subject: str,
    days: int,
    authority: _Signed | None = None,
    *extensions: x509.ExtensionType,
) -> _Signed:
    """Make a key and its certificate. authority: None = it is one itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    itself = authority is None
    issuer, by = (
        (authority.certificate.subject, authority.key) if authority else (name, key)
    )
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=not itself,
        key_cert_sign=itself,
        crl_sign=itself,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=itself, path_length=0 if itself else None)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # One hour back, for machines whose clocks are behind.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in (
        # RFC 5280 asks for them, and Python from 3.13 on insists.
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()),
        *extensions,
    ):
        builder = builder.add_extension(extension, critical=False)
    return _Signed(builder.sign(by, hashes.SHA256()), key)


def _hosts(names: Iterable[str]) -> list[x509.GeneralName]:
    entries: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            entries.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            if len(name) > 253 or not HOST_NAME.fullmatch(name):
                raise SecurityError(
                    f"name {name!r} is neither an IP address nor a host name (letters, "
                    f"digits, '-' and '.'); give it as islands dial it"
                ) from None
            entries.append(x509.DNSName(name))
    return entries


def _write(folder: Path, known: list[Issued], signed: dict[str, _Signed]) -> None:
    """Write certificates and keys; first their list, which must be there before anybody
    gets one of them."""
    listed = known + [
        Issued(one.serial_number, one.not_valid_after_utc, stem)
        for stem, (one, _) in signed.items()
        if stem != "ca"
    ]
    lines = "".join(f"{n:x} {end.isoformat()} {stem}\n" for n, end, stem in listed)
    write_text(lines, folder / ISSUED)
    for stem, (certificate, key) in signed.items():
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public = certificate.public_bytes(serialization.Encoding.PEM)
        _replace(folder / f"{stem}.key", private, 0o600)
        _replace(folder / f"{stem}.pem", public, 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    with whole(path) as scratch:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """The options of `diloco certs`."""

    folder: Path = positional(metavar="DIR", help="Folder of the certificates.")
    hosts: tuple[str, ...] = setting(
        (),
        help="Names and addresses at which islands reach the coordinator, besides "
        "localhost; without any, only its own machine reaches it.",
    )
    islands: tuple[str, ...] = setting(
        (),
        help="Names of islands, as the config has them: each gets a key of its own. "
        "With --add, those that have one get another.",
    )
    workers: int = setting(
        0,
        NOT_NEGATIVE,
        help="Workers of the coordinator (placement.workers) that get a key of their "
        "own.",
    )
    revoke: tuple[str, ...] = setting(
        (),
        metavar="[WHO [WHO ...]]",
        help="Shut out whoever has these certificates, by the names of their files "
        "(island.v6e): the coordinator reads DIR's revoked.txt while it runs.",
    )
    days: int = setting(365, help="Days for which the certificates are valid.")
    add: bool = setting(False, help="Add hosts or islands to DIR's authority.")
    replace: bool = setting(False, help="Replace DIR's authority.")


def certs_command(arguments: Sequence[str]) -> int:
    """Make a run's authority and certificates, or add to them."""
    (options,) = parse(
        [CertsOptions],
        arguments,
        "diloco certs",
        "Make a run's authority and certificates for mutual TLS.",
    )
    if options.add + options.replace + bool(options.revoke) > 1:
        raise ConfigError("--add, --replace and --revoke: choose one of them")

    folder, limit = options.folder, CA_DAYS
    if not 1 <= options.days <= limit:
        raise ConfigError(
            f"--days {options.days}: certificates are valid for 1 day to the "
            f"authority's own {limit} days; choose from these"
        )
    for name in options.islands:
        check_name(name)
    try:
        if options.revoke:
            _revoke(folder, options.revoke)
            return 0
        named: dict[str, Any] = {
            "islands": options.islands,
            "workers": options.workers,
        }
        if options.add:
            add(folder, options.hosts, options.days, **named)
        else:
            make_certificates(
                folder, options.hosts, options.days, replace=options.replace, **named
            )
    except OSError as error:
        raise ConfigError(
            f"cannot write certificates to {folder}: {error.strerror}; give a folder "
            f"that is writable"
        ) from error
    names = ", ".join(coordinator_names(folder))
    here = principals(folder)
    islands = ", ".join(who.name for who in here if who.role == "island")
    print(
        f"certificates in {folder}, of a coordinator called {names}, and of "
        f"{f'islands {islands}' if islands else 'no island (--add --islands NAME)'}. "
        f"Give each machine, as --certificates, a folder with ca.pem and its own "
        f".pem and .key: coordinator.* and worker.*, island.NAME.*, or "
        f"reader.* to look on; ca.key to none",
        file=sys.stderr,
    )
    return 0


def _revoke(folder: Path, stems: Sequence[str]) -> None:
    """Revoke certificates, all of which must be known."""
    here = {one.stem for one in issued(folder)}
    for stem in stems:
        if stem not in here:
            known = ", ".join(sorted(here)) or "none"
            raise ConfigError(
                f"--revoke {stem}: {folder} has no certificate of that name"
                f"{suggest(stem, here)}; it has {known}"
            )
    for stem in dict.fromkeys(stems):
        who = of_stem(stem)
        assert who is not None
        dialled = ", and who connects to it beside its own" * (who.role != "island")
        numbers = ", ".join(f"{serial:x}" for serial in revoke(folder, who))
        print(
            f"{who}: serial numbers in hex {numbers}, in {folder / REVOKED}; a "
            f"coordinator whose folder that is shuts them out within seconds, others "
            f"need the file beside their coordinator.pem{dialled}",
            file=sys.stderr,
        )
