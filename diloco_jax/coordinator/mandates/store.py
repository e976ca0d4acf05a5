"""The object of the mandate, wherever it lies: two calls, and its contents as bytes.

A write takes effect only if the object is at the generation that the write names, even
if it comes late. Nothing else is asked of a store.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from diloco_jax.protocol.standby.mandate import Mandate


class StoreError(Exception):
    """A store does not answer as it should; a write may have been done."""


class MandateStore(Protocol):
    """One object. A call may come from any thread, and ends within about `timeout_s`;
    any error means that its outcome is unknown."""

    def read(self, timeout_s: float) -> tuple[str, Mandate | None]:
        """Return the object's generation and contents; NO_GENERATION and None if it
        does not exist."""
        ...

    def write(self, mandate: Mandate, generation: str, timeout_s: float) -> str | None:
        """Replace the object, if it is at this generation, and return its new one.
        Returns None if it is not; nothing has changed then."""
        ...


def encode(mandate: Mandate) -> bytes:
    """Return the bytes of an object."""
    return msgspec.json.encode(mandate)


def decode(content: bytes | str, where: str) -> Mandate:
    """Return the mandate in an object. Raises StoreError if it is none."""
    try:
        return msgspec.json.decode(content, type=Mandate)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{where} is not a mandate of this version ({error}); remove it while no "
            f"coordinator of the run is up, and start the one that led last"
        ) from error
