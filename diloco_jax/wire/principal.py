"""Principals: the owners of certificates, by role, and by name if there are several.

A certificate carries its principal as a URI, `diloco:island:v6e`, and its files are
named after it, `island.v6e.pem`. The name that an island claims is compared with its
certificate at every hello, upload and fetch. Reports belong to the stream of a hello.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from diloco_jax.protocol.values import ISLAND_NAME
from diloco_jax.wire.errors import Refused

SCHEME = "diloco"
Role = Literal["coordinator", "worker", "island", "reader", "operator"]
NAMED = ("worker", "island")


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a key of its own."""

    role: Role
    name: str = ""
    """Name of an island, or number of a worker; empty for other roles."""

    @property
    def uri(self) -> str:
        """The principal's name in its certificate."""
        return ":".join(filter(None, (SCHEME, self.role, self.name)))

    @property
    def stem(self) -> str:
        """The name of the principal's files, without .pem and .key."""
        return ".".join(filter(None, (self.role, self.name)))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.role, self.name)))


COORDINATOR = Principal(role="coordinator")
READER = Principal(role="reader")
"""Looks on: `diloco status`."""
OPERATOR = Principal(role="operator")
"""Steers a run from outside."""


def island(name: str) -> Principal:
    """Return the principal of an island."""
    return Principal(role="island", name=name)


def worker(number: int) -> Principal:
    """Return the principal of a worker of the coordinator."""
    return Principal(role="worker", name=str(number))


def of_uri(uri: str) -> Principal | None:
    """Return the principal that a URI names; None if it names none."""
    scheme, role, *name = uri.split(":")
    if scheme != SCHEME or role not in get_args(Role):
        return None
    return _of_parts(role, name)


def of_stem(stem: str) -> Principal | None:
    """Return the principal whose files have this name; None if there is none."""
    role, *name = stem.split(".", 1)
    return _of_parts(role, name) if role in get_args(Role) else None


def _of_parts(role: str, name: list[str]) -> Principal | None:
    if (role in NAMED) != bool(name) or len(name) > 1:
        return None
    if name and not re.search(ISLAND_NAME, name[0]):
        return None
    if role == "worker" and not name[0].isdecimal():
        return None
    found: Principal = msgspec.convert({"role": role, "name": "".join(name)}, Principal)
    return found


def require_island(caller: Principal | None, name: str) -> None:
    """Raise Refused unless the caller is the island of this name.

    caller: None if the address is served without TLS; then every caller is accepted.
    """
    if caller is None or caller == island(name):
        return
    raise Refused(
        "identity",
        f"the call is of island {name!r}, and its certificate is that of {caller}; "
        f"start island {name!r} with its own {island(name).stem}.pem and .key "
        f"(`diloco certs DIR --add --islands {name}` makes them)",
    )


def not_worker(server: Principal | None, number: int, *, own: bool = False) -> str:
    """Explain why a server is not this worker; empty if it is.

    The coordinator counts as its worker, unless the worker needs a key of its `own`:
    one on its machine that has none uses the coordinator's.
    """
    if server == worker(number) or (server == COORDINATOR and not own):
        return ""
    others = "" if own else " or of the coordinator"
    field = "placement.worker_addresses" if own else "placement.advertise"
    return (
        f"that is the certificate of {server or 'nobody'}, and has to be that of "
        f"{worker(number)}{others}; check {field}, and what listens there"
    )


def not_island(server: Principal | None, name: str) -> str:
    """Explain why a server is not the island of this name; empty if it is."""
    if server == island(name):
        return ""
    return (
        f"that is the certificate of {server or 'nobody'}, and has to be that of "
        f"{island(name)}; check islands.{name}.offers, and what listens there"
    )


def require_lead(caller: Principal | None, number: int) -> None:
    """Raise Refused unless the caller may lead this worker; see `require_island`."""
    if caller is None or caller == COORDINATOR:
        return
    raise Refused(
        "identity",
        f"{worker(number)} obeys the {COORDINATOR} alone, and the caller's certificate "
        f"is that of {caller}; start the coordinator with its own "
        f"{COORDINATOR.stem}.pem and .key",
    )


def require_operator(caller: Principal | None) -> None:
    """Raise Refused unless the caller is the operator; see `require_island`."""
    if caller is None or caller == OPERATOR:
        return
    raise Refused(
        "identity",
        f"this is for the operator, and the caller's certificate is that of {caller}; "
        f"use the {OPERATOR.stem}.pem and .key that `diloco certs` made",
    )
