"""Errors of the wire, by cause, and how one end tells them to the other.

The class says which side is to blame: the path (`ConnectionLost`), this process
(`LocalProtocolError`), the peer (`RemoteProtocolError`), the peer's decision
(`Refused`, `Busy`, `VersionGone`) or the certificates (`SecurityError`).
"""

from __future__ import annotations

import logging
from typing import Any

import grpc

from diloco_jax.protocol.messages import Message

MAX_DETAIL_CHARS = 2000
CODE_KEY = "diloco-code"
REVOKED_CODE = "revoked"
"""Code of a refusal of a certificate; its owner may get another one."""


class WireError(Exception):
    """Base of all errors of this package."""


class ConnectionLost(WireError):  # noqa: N818
    """The peer is gone, cannot be reached, or did not answer in time. A retry may
    help."""


class NoAnswer(ConnectionLost):
    """The peer did not answer in time, and nothing else is known of it."""


class ProtocolError(WireError):
    """One side broke the rules of the wire; the session or transfer is over."""


class LocalProtocolError(ProtocolError):
    """This process sent, or was about to send, a message that breaks the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer sent a message that breaks the protocol: corrupt, oversized, unknown or
    out of order.
    """


class Refused(WireError):  # noqa: N818
    """The peer said no for good: `code` for programs, `message` for people.

    The refused process exits with code 3.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Busy(WireError):  # noqa: N818
    """The peer has no room for this transfer now. A later retry may succeed."""


class VersionGone(WireError):  # noqa: N818
    """The version asked for is not kept any more. The fragment must be fetched
    again."""


class SecurityError(WireError):
    """A certificate or key is missing, wrong, expired or unreadable."""


class Failure(Message, frozen=True, kw_only=True, tag=True):
    """Answer to a request that failed: class and message of the error. After a failed
    upload the connection ends.
    """

    kind: str
    message: str
    code: str = ""
    """Refused's."""


# The status a server answers with, and the error its client makes of it. An error that
# blames the peer becomes one that blames this process at the other end.
_STATUS: tuple[tuple[type[WireError], grpc.StatusCode, type[WireError]], ...] = (
    (Refused, grpc.StatusCode.FAILED_PRECONDITION, Refused),
    (Busy, grpc.StatusCode.ABORTED, Busy),
    (VersionGone, grpc.StatusCode.NOT_FOUND, VersionGone),
    (RemoteProtocolError, grpc.StatusCode.INVALID_ARGUMENT, LocalProtocolError),
    (SecurityError, grpc.StatusCode.UNAUTHENTICATED, SecurityError),
    (ConnectionLost, grpc.StatusCode.UNAVAILABLE, ConnectionLost),
    (WireError, grpc.StatusCode.INTERNAL, RemoteProtocolError),
)
# The statuses that gRPC itself raises.
_RAISED: dict[grpc.StatusCode, type[WireError]] = {
    **{code: there for _, code, there in _STATUS},
    grpc.StatusCode.DEADLINE_EXCEEDED: NoAnswer,
    grpc.StatusCode.CANCELLED: ConnectionLost,
    grpc.StatusCode.UNKNOWN: ConnectionLost,
    grpc.StatusCode.UNIMPLEMENTED: RemoteProtocolError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LocalProtocolError,
}


def told(error: Exception) -> tuple[int, WireError]:
    """Return the level at which the log has an error of a call, and the error that its
    peer is told: of a bug or a full disk at this end, that there is one."""
    if isinstance(error, WireError):
        return logging.INFO, error
    return logging.ERROR, WireError(
        f"the process there failed on this call ({type(error).__name__}); see its log"
    )


def status_of(error: WireError) -> tuple[grpc.StatusCode, type[WireError]]:
    """Return the status with which a server ends a call because of `error`, and the
    class of the error that the client gets."""
    return next(row[1:] for row in _STATUS if isinstance(error, row[0]))


def abort(context: Any, error: WireError) -> None:
    """End the call of a `grpc.ServicerContext` with `error`; never return."""
    if isinstance(error, Refused):
        context.set_trailing_metadata(((CODE_KEY, error.code),))
    context.abort(status_of(error)[0], str(error)[:MAX_DETAIL_CHARS])


def failure_of(error: WireError) -> Failure:
    """Return the message with which the bulk port answers because of `error`."""
    return Failure(
        kind=status_of(error)[1].__name__,
        message=str(error)[:MAX_DETAIL_CHARS],
        code=error.code if isinstance(error, Refused) else "",
    )


def from_rpc(error: Any, peer: str) -> WireError:
    """Return the error behind a `grpc.RpcError` that a client got from `peer`."""
    code, details = error.code(), error.details() or "no details"
    kind = _RAISED.get(code, RemoteProtocolError)
    refused = ""
    if kind is Refused:
        refused = str(dict(error.trailing_metadata() or ()).get(CODE_KEY, ""))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if details.startswith("CLIENT:"):
            kind = RemoteProtocolError
        details += "; both ends must run the same version of diloco"
    if code is grpc.StatusCode.INTERNAL and "RST_STREAM" in details:
        kind = ConnectionLost
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return kind(f"{peer} is no coordinator of this version of diloco: {details}")
    return _error(kind, peer, details, refused)


def from_failure(failure: Failure, peer: str) -> WireError:
    """Return the error behind a failure that a client got from `peer`."""
    kinds = {there.__name__: there for _, _, there in _STATUS}
    kind = kinds.get(failure.kind, RemoteProtocolError)
    return _error(kind, peer, failure.message, failure.code)


def _error(kind: type[WireError], peer: str, text: str, code: str) -> WireError:
    if kind is Refused:
        return Refused(code or "refused", text)
    if kind is LocalProtocolError:
        text = f"rejected what this process sent: {text}"
        return kind(f"{peer} {text}")
    return kind(f"{peer}: {text}")
