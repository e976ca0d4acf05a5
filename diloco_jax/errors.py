"""Errors of configs and command lines, the disk's errors, and "did you mean"."""

from __future__ import annotations

import errno

from diloco_jax.core.members import suggest as suggest

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a write that finds no space."""
UNNAMEABLE = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path's name: the user has to give another."""
UNUSABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR)
"""Errors of a folder that has changed meanwhile: it was checked before the command."""


class ConfigError(ValueError):
    """A configuration that cannot run: names the field, its value and the remedy.

    Example:
      >>> from diloco_jax import Config, ConfigError
      >>> try:
      ...     Config().replace("sync.quorum", 2).validate()
      ... except ConfigError as error:
      ...     print(error)
      sync.quorum = 2, but there are 1 islands...
    """


def disk_failure(error: OSError, *, after: str) -> str:
    """Return the message for a full or unusable place, empty for other errors.

    after: what follows once there is room.
    """
    where = f"{error.filename}: " if error.filename is not None else ""
    what = f"{where}{error.strerror}"
    if error.errno in FULL:
        return f"{what}: make room there{after}"
    return f"{what}; check that place" if error.errno in UNUSABLE else ""
