"""Tickets: the lead's permission for an island to send or fetch, for workers to check.

The lead makes a ticket for each take that it asks for and each version that it
publishes. The island shows it, and the worker, which has the lead's key, checks it
without asking anybody. A ticket is 8 bytes of its last moment and 16 bytes of a MAC
over all that it permits (HMAC-SHA256, truncated as in RFC 2104, section 5).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.messages import (
    AnchorRequest,
    FromCoordinator,
    Published,
    ResendRequest,
    TakeRequest,
    TakeVerdict,
    Welcome,
)
from diloco_jax.protocol.values import Version

MAC_BYTES = 16
MOMENT_BYTES = 8
KEY_BYTES = 32
"""Bytes of a key; each life of the lead draws one."""


class Permit(NamedTuple):
    """The subject of a ticket: an upload of the take of a tick, fetches of a fragment
    up to a version, or an upload of the anchor that begins a term (`of_anchor`).
    """

    run_id: str
    island: str
    incarnation: int
    fragment: int
    of: int | Version
    """Tick of the take, or version."""


def of_anchor(term: int) -> Version:
    """Return `Permit.of` for the anchor that begins a term of a fragment."""
    return Version(term, -1)


Flaw = Literal["", "malformed", "forged", "expired", "fenced"]
"""Reason for which a ticket does not count; empty: it does."""


def make(key: bytes, permit: Permit, until: float) -> bytes:
    """Return a ticket that counts until this time, in seconds of the lead's clock.

    Raises ValueError unless the key has `KEY_BYTES`."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {len(key)} bytes, expected {KEY_BYTES}")
    moment = int(until * 1000).to_bytes(MOMENT_BYTES, "big")
    return moment + _mac(key, permit, moment)


def stamped(
    key: bytes, message: FromCoordinator, whose: Permit, until: float
) -> FromCoordinator:
    """Return a message with tickets for all that it has the island do at workers.

    whose: run, island and incarnation that it goes to."""

    def ticket(fragment: int, of: int | Version) -> bytes:
        return make(key, whose._replace(fragment=fragment, of=of), until)

    match message:
        case TakeRequest() | ResendRequest():
            return replace(message, ticket=ticket(message.fragment, message.tick))
        case Published() | TakeVerdict():
            return replace(message, ticket=ticket(message.fragment, message.version))
        case AnchorRequest(fragment=fragment, term=term):
            return replace(message, ticket=ticket(fragment, of_anchor(term)))
        case Welcome():
            each = [ticket(f, version) for f, version in enumerate(message.versions)]
            return replace(message, tickets=tuple(each))
    return message


class _Lead(NamedTuple):
    """A life of the lead, as its tickets need it."""

    key: bytes
    ahead_s: float


class Checker:
    """A worker's check of tickets."""

    def __init__(self, key: bytes, ahead_s: float = 0.0) -> None:
        """ahead_s: seconds by which the worker's clock is ahead of the lead's, which
        may run on another machine since another time."""
        self._leads: tuple[_Lead, ...] = (_Lead(key, ahead_s),)
        self._least: dict[str, int] = {}

    def renew(self, key: bytes, ahead_s: float = 0.0) -> None:
        """Count the tickets of the next lead from now on, beside those of this one,
        which islands still have. A lead that dials again may have slept meanwhile:
        its tickets count by its clock as it is now.
        """
        before = self._leads[1:] if key == self._leads[0].key else self._leads[:1]
        self._leads = (_Lead(key, ahead_s), *before)

    def fence(self, island: str, before: int) -> None:
        """Refuse the incarnations of an island below `before` from now on."""
        self._least[island] = max(before, self._least.get(island, 0))

    def flaw(self, ticket: bytes, permit: Permit, now: float) -> Flaw:
        """Return why a ticket does not permit this now; "" if it does. now: of the
        worker's clock."""
        if len(ticket) != MOMENT_BYTES + MAC_BYTES:
            return "malformed"
        moment, mac = ticket[:MOMENT_BYTES], ticket[MOMENT_BYTES:]
        by = [x for x in self._leads if _is_of(x.key, permit, moment, mac)]
        if not by:
            return "forged"
        if (now - by[0].ahead_s) * 1000 > int.from_bytes(moment, "big"):
            return "expired"
        if permit.incarnation < self._least.get(permit.island, 0):
            return "fenced"
        return ""


def _is_of(key: bytes, permit: Permit, moment: bytes, mac: bytes) -> bool:
    return hmac.compare_digest(_mac(key, permit, moment), mac)


def _mac(key: bytes, permit: Permit, moment: bytes) -> bytes:
    # MessagePack says the length of each field, so two permits never look alike.
    said = msgspec.msgpack.encode((*permit, moment))
    return hmac.digest(key, said, hashlib.sha256)[:MAC_BYTES]
