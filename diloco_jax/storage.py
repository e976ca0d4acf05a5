"""Check that checkpoints can be written to a folder, and explain why not.

The folder is local, or in a bucket: gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from etils.epath import Path as Folder

from diloco_jax.errors import ConfigError
from diloco_jax.paths import S3, StorageAway, is_bucket

PASSING_CODES = (408, 429)
"""HTTP status codes of errors that pass; those from 500 on pass, too."""
PASSING_WORDS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""Words in tensorstore's messages about errors that pass."""
PASSING_MODULES = ("aiohttp.", "requests.", "urllib3.")
"""Packages whose errors concern the connection to the bucket."""
PASSING_OF_S3 = ("ConnectionError", "HTTPClientError")
"""Bases of botocore's errors that do; it has others, which do not pass."""


def require_access(folder: Folder) -> None:
    """Make the folder, and write and remove a file in it.

    Raises ConfigError, naming the account, if that is refused; StorageAway if the
    bucket does not answer.
    """
    probe = folder / f"probe-{uuid.uuid4().hex}"
    try:
        if _is_s3(folder):
            _require_bucket_of_s3(folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("may be deleted")
        probe.unlink()
        if is_bucket(str(folder)) and not _is_s3(folder):
            _require_bucket_of_gcs(folder)
    except Exception as error:
        # Each bucket backend has its own error classes.
        raise_if_away(folder, error)
        raise ConfigError(cannot_write(folder, error)) from error


def cannot_write(folder: Folder, error: Exception) -> str:
    """Return a message with the folder, the account, the reason and the remedy."""
    if isinstance(error, ImportError):
        return (
            f"checkpoints in {folder} need a package that is not here ({error}); "
            f"`pip install -e '.[{_extra(folder)}]'`, or give a local folder as "
            f"--checkpoints"
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
            f"'.[{_extra(folder)}]'`, or copy it to a local folder and give that"
        )
    role = "roles/storage.objectViewer"
    if _is_s3(folder):
        role = "s3:ListBucket and s3:GetObject"
    return (
        f"cannot read {folder}{_identity(folder)}: {_reason(error)}. Grant {role} on "
        f"bucket {_bucket(folder)} to that account"
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
        number = _http_status(error)
        if number in PASSING_CODES or number >= 500:
            return True
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        kind = type(error)
        if kind.__module__.startswith(PASSING_MODULES) or "Transport" in kind.__name__:
            return True
        bases = [b for b in kind.__mro__ if b.__module__.startswith("botocore.")]
        if any(base.__name__ in PASSING_OF_S3 for base in bases):
            return True
        if any(word in str(error) for word in PASSING_WORDS):
            return True
        error = error.__cause__
    return False


def _reason(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _http_status(error: BaseException) -> int:
    """Return the status of the answer that an error is about; 0 if it has none."""
    code = str(getattr(error, "code", "") or "")
    if code.isdecimal():
        return int(code)
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def _require_bucket_of_gcs(folder: Folder) -> None:
    """Look at the bucket itself, as orbax does before it lists or deletes objects."""
    from google.cloud import storage

    storage.Client().get_bucket(_bucket(folder))


def _require_bucket_of_s3(folder: Folder) -> None:
    """Look at the bucket itself: to make a folder in it would make one that is
    missing."""
    if not Folder(f"{S3}{_bucket(folder)}").exists():
        raise FileNotFoundError("there is no such bucket, or it may not be listed")


def _is_s3(folder: Folder) -> bool:
    return str(folder).startswith(S3)


def _extra(folder: Folder) -> str:
    """Return the extra of this package that has what the folder needs."""
    return "s3" if _is_s3(folder) else "gcs"


def _bucket(folder: Folder) -> str:
    return str(folder).split("/")[2]


def _identity(folder: Folder) -> str:
    if not is_bucket(str(folder)):
        return f" as user {os.getuid()}"
    if _is_s3(folder):
        given = (os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"))
        known = next(filter(None, given), "")
    else:
        path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
        try:
            known = json.loads(Path(path).read_bytes()).get("client_email", "")
        except (OSError, ValueError):
            known = ""
    return f" as {known or 'the default account of this machine'}"


def _remedy(folder: Folder) -> str:
    if not is_bucket(str(folder)):
        return "Make it writable"
    needed = "roles/storage.objectUser and roles/storage.legacyBucketReader"
    log_in = "gcloud auth application-default login"
    if _is_s3(folder):
        needed = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject"
        log_in = "aws configure"
    return (
        f"Grant {needed} on bucket {_bucket(folder)} to that account, or log in with "
        f"another (`{log_in}`)"
    )
