"""Which errors say that a disk is broken, and which may pass."""

from __future__ import annotations

import errno

import pytest

from diloco_jax.coordinator.disk_wait import given_up
from diloco_jax.coordinator.log import DurableError
from diloco_jax.coordinator.standby.broken_disk import is_of_broken_disk
from diloco_jax.errors import ConfigError
from diloco_jax.storage import SealedError


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "read-only file system"),
        OSError(errno.EIO, "input/output error"),
        given_up("a record", 9.0, 9.0, OSError(errno.ENOSPC, "full", "log")),
        DurableError("the log is damaged"),
        SealedError("a snapshot is damaged"),
    ],
)
def test_a_disk_that_does_not_mend_itself_is_broken(error: Exception) -> None:
    assert is_of_broken_disk(error)
    wrapped = ConfigError("worker 0 did not come up")
    wrapped.__cause__ = error
    assert is_of_broken_disk(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "cannot allocate memory"),
        OSError(errno.EMFILE, "too many open files"),
        OSError(errno.ENFILE, "too many open files in system"),
        OSError("without a number"),
        MemoryError(),
        ConfigError("the address is in use"),
    ],
)
def test_what_may_pass_is_no_broken_disk(error: Exception) -> None:
    assert not is_of_broken_disk(error)
