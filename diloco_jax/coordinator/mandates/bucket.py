"""The mandate as an object of Google Cloud Storage, which keeps generations itself.

One object may be written about once a second, which is less often than renewals come
with a time budget of 5 s or more.
"""

from __future__ import annotations

from typing import Any

from diloco_jax.coordinator.mandates.store import decode, encode
from diloco_jax.errors import ConfigError
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate

BUCKET = "gs://"


class BucketStore:
    """See `store.MandateStore`. Nothing is tried again here: the protocol does that."""

    def __init__(self, where: str) -> None:
        """where: gs://BUCKET/OBJECT."""
        bucket, _, name = where.removeprefix(BUCKET).partition("/")
        if not (bucket and name) or name.endswith("/"):
            raise ConfigError(
                f"placement.mandate = {where!r} names no object; give gs://BUCKET/NAME"
            )
        try:
            from google.cloud import storage
        except ImportError as error:
            raise ConfigError(
                f"placement.mandate = {where!r} needs a package that is not here "
                f"({error}); `pip install -e '.[gcs]'`"
            ) from error
        self._where, self._name = where, name
        self._bucket: Any = storage.Client().bucket(bucket)

    def read(self, timeout_s: float) -> tuple[str, Mandate | None]:
        """Return the object's generation and contents, which come in one answer."""
        from google.api_core.exceptions import NotFound

        blob = self._bucket.blob(self._name)
        try:
            content = blob.download_as_bytes(timeout=timeout_s, retry=None)
        except NotFound:
            return NO_GENERATION, None
        return str(blob.generation), decode(content, self._where)

    def write(self, mandate: Mandate, generation: str, timeout_s: float) -> str | None:
        """Replace the object at this generation; 0 is that of one that is missing."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._name)
        try:
            blob.upload_from_string(
                encode(mandate),
                content_type="application/json",
                if_generation_match=int(generation or 0),
                timeout=timeout_s,
                retry=None,
            )
        except PreconditionFailed:
            return None
        return str(blob.generation)
