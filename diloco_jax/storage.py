"""Check that checkpoints can be written to a folder, and explain why not.

The folder is local, or gs://BUCKET/FOLDER.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from etils.epath import Path as Folder

from diloco_jax.errors import ConfigError
from diloco_jax.paths import StorageAway, is_bucket

PASSING_CODES = (408, 429)
"""HTTP status codes of errors that pass; those from 500 on pass, too."""
PASSING_WORDS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Words in tensorstore's messages about errors that pass."""
PASSING_MODULES = ("aiohttp.", "requests.", "urllib3.")
"""Packages whose errors concern the connection to the bucket."""


def require_access(folder: Folder) -> None:
    """Make the folder, and write and remove a file in it.

    Raises ConfigError, naming the account, if that is refused; StorageAway if the
    bucket does not answer.
    """
    probe = folder / f"probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("may be deleted")
        probe.unlink()
        if is_bucket(str(folder)):
            _require_bucket(folder)
    except Exception as error:
        # Each bucket backend has its own error classes.
        raise_if_away(folder, error)
        raise ConfigError(cannot_write(folder, error)) from error


def cannot_write(folder: Folder, error: Exception) -> str:
    """Return a message with the folder, the account, the reason and the remedy."""
    if isinstance(error, ImportError):
        return (
            f"checkpoints in {folder} need a package that is not here ({error}); "
            f"`pip install -e '.[gcs]'`, or give a local folder as --checkpoints"
        )
    return (
        f"cannot write checkpoints to {folder}{_identity(folder)}: {_reason(error)}. "
        f"{_remedy(folder)}, or give another folder as --checkpoints"
    )


def cannot_read(folder: Folder, error: Exception) -> str:
    """Return a message with the folder, the account, the reason and the remedy."""
    if isinstance(error, ImportError):
        return (
            f"{folder} needs a package that is not here ({error}); `pip install -e "
            f"'.[gcs]'`, or copy it to a local folder and give that"
        )
    return (
        f"cannot read {folder}{_identity(folder)}: {_reason(error)}. Grant "
        f"roles/storage.objectViewer on bucket {_bucket(folder)} to that account"
    )


def raise_if_away(folder: Folder, error: BaseException) -> None:
    """Raise StorageAway if the error is one that passes."""
    if is_bucket(str(folder)) and _passes(error):
        raise StorageAway(
            f"{folder} does not answer: {_reason(error)}; start the command again, as "
            f"a supervisor does"
        ) from error


def _passes(error: BaseException | None) -> bool:
    while error is not None:
        code = str(getattr(error, "code", "") or "")
        number = int(code) if code.isdecimal() else 0
        if number in PASSING_CODES or number >= 500:
            return True
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        kind = type(error)
        if kind.__module__.startswith(PASSING_MODULES) or "Transport" in kind.__name__:
            return True
        if any(word in str(error) for word in PASSING_WORDS):
            return True
        error = error.__cause__
    return False


def _reason(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _require_bucket(folder: Folder) -> None:
    """Look at the bucket itself, as orbax does before it lists or deletes objects."""
    from google.cloud import storage

    storage.Client().get_bucket(_bucket(folder))


def _bucket(folder: Folder) -> str:
    return str(folder).split("/")[2]


def _identity(folder: Folder) -> str:
    if not is_bucket(str(folder)):
        return f" as user {os.getuid()}"
    path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    try:
        known = json.loads(Path(path).read_bytes()).get("client_email", "")
    except (OSError, ValueError):
        known = ""
    return f" as {known or 'the default account of this machine'}"


def _remedy(folder: Folder) -> str:
    if not is_bucket(str(folder)):
        return "Make it writable"
    bucket = _bucket(folder)
    return (
        f"Grant roles/storage.objectUser and roles/storage.legacyBucketReader on "
        f"bucket {bucket} to that account, or log in with another (`gcloud auth "
        f"application-default login`)"
    )
