"""Tell a disk that is broken from what may pass: who cedes the mandate does not lead
again from the disk with which it ceded."""

from __future__ import annotations

import errno

from diloco_jax.coordinator.log import DurableError
from diloco_jax.errors import FULL
from diloco_jax.storage import SealedError

BROKEN = (
    *(errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV),
    *(getattr(errno, "EUCLEAN", errno.EIO), errno.EBADMSG, errno.ESTALE),
    *FULL,
)
"""Errors of a disk that does not mend itself; space has been waited for where that is
done (`disk_wait.py`). A machine without memory or open files is none of them."""


def is_of_broken_disk(error: BaseException | None) -> bool:
    """Tell if an error, or one from which it was raised, is of a broken disk, or of one
    that has something else than what was written."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in BROKEN:
            return True
        if isinstance(error, DurableError | SealedError):
            return True
        error = error.__cause__
    return False
