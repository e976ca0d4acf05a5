"""The certificates that an authority has signed and that are still valid: one may be
renewed and its file overwritten, yet whoever copied the old one with its key gets in
until it is revoked.

`issued.txt` lies beside `ca.key`: serial number in hex, end and principal on each line.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from diloco_jax.files import write_text
from diloco_jax.wire.errors import SecurityError

ISSUED = "issued.txt"
BEGUN_LATE = "# begun"
"""Begins the line that says from when on the file is complete, if it is younger than
the authority."""


class Issued(NamedTuple):
    """A certificate that was signed."""

    serial: int
    end: datetime.datetime
    stem: str
    """The principal's, see `Principal.stem`."""

    @classmethod
    def of(cls, stem: str, certificate: x509.Certificate) -> Issued:
        """Return what the file keeps of a certificate."""
        end = certificate.not_valid_after_utc
        return cls(certificate.serial_number, end, stem)


class Register(NamedTuple):
    """Certificates that are still valid."""

    issued: tuple[Issued, ...] = ()
    since: str = ""
    """Day before which certificates may have been signed that are not listed; empty if
    all are."""

    def serials(self, stem: str) -> list[int]:
        """Return the serial numbers of one principal, oldest first."""
        return [one.serial for one in self.issued if one.stem == stem]


def read(folder: Path, here: Mapping[str, x509.Certificate]) -> Register:
    """Return the certificates that were signed and have not ended.

    here: certificates in the folder by stem; they count though the file may be missing,
    as in a folder made by an earlier version. Raises SecurityError if the file cannot
    be read.
    """
    now = datetime.datetime.now(datetime.UTC)
    since, found = "", list[Issued]()
    path = folder / ISSUED
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        lines = [f"{BEGUN_LATE} {now.date()}"]
    for number, line in enumerate(lines, 1):
        if line.startswith(BEGUN_LATE):
            since = line.removeprefix(BEGUN_LATE).strip()
            continue
        try:
            serial, end, stem = line.split()
            one = Issued(int(serial, 16), datetime.datetime.fromisoformat(end), stem)
            found += [one] if one.end > now else []
        except (ValueError, TypeError) as error:
            raise SecurityError(
                f"{path}, line {number}: {line!r} is no serial number, end and owner "
                f"of a certificate ({error}); restore the file, or replace the "
                f"authority (`diloco certs --replace`)"
            ) from error
    known = {one.serial for one in found}
    lacking = [Issued.of(stem, certificate) for stem, certificate in here.items()]
    found += [one for one in lacking if one.serial not in known and one.end > now]
    return Register(tuple(found), since)


def write(folder: Path, register: Register, signed: Iterable[Issued]) -> None:
    """Add certificates. The file must be there before anybody gets one of them."""
    lines = [f"{BEGUN_LATE} {register.since}"] if register.since else []
    lines += [
        f"{one.serial:x} {one.end.isoformat()} {one.stem}"
        for one in (*register.issued, *signed)
    ]
    write_text("".join(f"{line}\n" for line in lines), folder / ISSUED)
