"""Checkpoints: orbax behind four functions.

A checkpoint is a numbered folder with a tree of arrays and a JSON object beside it. It
appears under its number only when all of it is on disk.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)


def open_folder(folder: Path, keep: int) -> ocp.CheckpointManager:
    """A folder of checkpoints, created if missing, that keeps the newest `keep`."""
    logging.getLogger("absl").setLevel(logging.WARNING)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def save(
    manager: ocp.CheckpointManager, number: int, arrays: Any, facts: dict[str, Any]
) -> None:
    """Writes checkpoint `number`; it is durable when this returns."""
    args = ocp.args.Composite(
        arrays=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave(facts)
    )
    manager.save(number, args=args, force=True)
    manager.wait_until_finished()


def restore(
    manager: ocp.CheckpointManager, number: int, like: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The arrays, shaped and placed as in `like` (None: as they were saved), and the
    facts of a checkpoint."""
    args = ocp.args.Composite(
        arrays=ocp.args.StandardRestore(like), facts=ocp.args.JsonRestore()
    )
    restored = manager.restore(number, args=args)
    return restored["arrays"], restored["facts"]


def newest(manager: ocp.CheckpointManager) -> int | None:
    """The number of the newest complete checkpoint, if there is one."""
    number: int | None = manager.latest_step()
    return number
