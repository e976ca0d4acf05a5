"""Errors of configs and command lines, the disk's errors, and "did you mean".

The exit codes of the commands and processes of this project are `EXIT_...`; any other
is a crash. Another attempt cures neither `EXIT_CONFIG` nor `EXIT_REFUSED`.
"""

from __future__ import annotations

import errno

from diloco_jax.core.members import suggest as suggest

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""Bad arguments or config."""
EXIT_REFUSED = 3
"""Refused by the peer."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a write that finds no space."""
UNNAMEABLE = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path's name: the user has to give another."""
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of a process, or a machine, that has too many files open."""
PASSING = FULL + OUT_OF_FILES
"""Errors of a write that may be repeated: nothing of it is on the disk."""
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
    if error.errno in PASSING:
        return f"{what}: {remedy(error)}{after}"
    return f"{what}; check that place" if error.errno in UNUSABLE else ""


def lack(error: OSError) -> str:
    """Name what a write lacks that may be repeated (`PASSING`)."""
    return "a free file" if error.errno in OUT_OF_FILES else "space"


def remedy(error: OSError) -> str:
    """Say what lets it succeed."""
    if error.errno in OUT_OF_FILES:
        return "raise the limit on open files (ulimit -n, LimitNOFILE=)"
    return "make room there"
