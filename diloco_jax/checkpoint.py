"""Checkpoints: orbax behind a few functions.

A checkpoint is a numbered folder with a tree of arrays and a JSON object beside it. It
appears under its number only when all of it is written. Folders are local, or
gs://BUCKET/FOLDER. Several hosts write one checkpoint together, each the shards that it
holds; whoever reads it may have another mesh, and another number of hosts.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from etils.epath import Path as Folder

from diloco_jax import run_files, storage
from diloco_jax.config import (
    ConfigError,
    Placement,
    RunConfig,
    differences,
    shared_fields,
)
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.models.plan import other_model
from diloco_jax.paths import is_bucket

logger = logging.getLogger(__name__)

ISLANDS = "islands"


class UnreadableError(ConfigError):
    """A checkpoint that is there does not read."""

    def __init__(self, what: str, remedy: str) -> None:
        """what: which, and why."""
        super().__init__(f"{what}; {remedy}")
        self.what = what


def snapshots_folder(placement: Placement, workdir: Path) -> Folder:
    """Where the coordinator's snapshots are."""
    return _root(placement, workdir) / "coordinator"


def island_folder(placement: Placement, workdir: Path, island: str) -> Folder:
    """Where an island's checkpoints are."""
    return _root(placement, workdir) / ISLANDS / island


def _root(placement: Placement, workdir: Path) -> Folder:
    # Nothing else may be in a folder of checkpoints: in a bucket, orbax takes other
    # folders there for unfinished ones, and removes them.
    return epath.Path(placement.checkpoints or workdir / run_files.CHECKPOINTS)


def open_folder(
    folder: Folder | Path, keep: int, *, hosts: int = 1, read_only: bool = False
) -> ocp.CheckpointManager:
    """A folder of checkpoints, made if missing, that keeps the newest `keep`.

    hosts: that write and read each checkpoint together, as processes of one
    `jax.distributed` world. What a writer finds unfinished there is removed.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)
    folder = epath.Path(folder)
    if not is_bucket(str(folder)):  # Of a bucket's, etils makes one of this machine.
        folder = folder.absolute()
    together = ocp.options.MultiprocessingOptions()
    if hosts > 1:
        # Named, so that they meet through the world's store: orbax would run a
        # collective otherwise, between those of the inner steps.
        together = ocp.options.MultiprocessingOptions(
            active_processes=set(range(hosts)), barrier_sync_key_prefix=folder.name
        )
    if not read_only:
        folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        create=False,
        cleanup_tmp_directories=not read_only,
        read_only=read_only,
        multiprocessing_options=together,
    )
    return ocp.CheckpointManager(folder, options=options)


def save(
    manager: ocp.CheckpointManager,
    number: int,
    trees: Mapping[str, Any],
    facts: dict[str, Any],
) -> None:
    """Writes checkpoint `number`, trees of arrays by name; it is durable when this
    returns. A failure leaves nothing of it in a folder of this machine, and is an
    OSError that names it where a disk is full."""
    arrays = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    args = ocp.args.Composite(**arrays, facts=ocp.args.JsonSave(facts))
    local = not is_bucket(str(manager.directory))
    try:
        manager.save(number, args=args, force=True)
        manager.wait_until_finished()
    except Exception as error:
        # A disk that is full would stay so.
        if local and jax.process_index() == 0:
            _remove_unfinished(Path(manager.directory), number)
        # Of tensorstore, it is a ValueError.
        reason = os.strerror(errno.ENOSPC)
        if local and reason in str(error):
            raise OSError(errno.ENOSPC, reason, str(manager.directory)) from error
        raise
    if local:
        _sync(Path(manager.directory), number)


def _read(manager: ocp.CheckpointManager, number: int, args: Any) -> Any:
    """What the checkpoint has; UnreadableError if it does not read."""
    try:
        return manager.restore(number, args=args)
    except Exception as error:
        # Of orbax, of tensorstore, of JSON: of many kinds, and long.
        folder = manager.directory
        storage.raise_if_away(folder, error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        remedy = "the record log does not go back to an older one that reads"
        if folder.parent.name == ISLANDS:
            remedy = "or remove it: the island goes on from an older one, or without"
        raise UnreadableError(
            f"checkpoint {number} in {folder} cannot be read ({reason})",
            f"restore it from a copy, {remedy}",
        ) from error


def restore(
    manager: ocp.CheckpointManager, number: int, name: str, like: Any = None
) -> Any:
    """A tree of arrays of a checkpoint, shaped and placed as in `like` (None: as they
    were saved)."""
    args = ocp.args.Composite(**{name: ocp.args.StandardRestore(like)})
    return _read(manager, number, args)[name]


def read_facts(manager: ocp.CheckpointManager, number: int) -> dict[str, Any]:
    """The JSON object of a checkpoint."""
    args = ocp.args.Composite(facts=ocp.args.JsonRestore())
    facts: dict[str, Any] = _read(manager, number, args)["facts"]
    return facts


def newest(manager: ocp.CheckpointManager) -> int | None:
    """The number of the newest complete checkpoint, if there is one."""
    number: int | None = manager.latest_step()
    return number


def kept(manager: ocp.CheckpointManager) -> list[int]:
    """The numbers of all complete checkpoints, oldest first."""
    return sorted(manager.all_steps())


def whose(run: RunConfig, run_id: str, plan: FragmentPlan) -> dict[str, Any]:
    """Facts by which a checkpoint is known to be of this run and model."""
    return {
        "run_id": run_id,
        "fingerprint": run.fingerprint(),
        "run": shared_fields(run),
        **of_model(plan),
    }


def of_model(plan: FragmentPlan) -> dict[str, Any]:
    """The fact by which the order of a checkpoint's arrays is known: see
    `refuse_other_model`."""
    return {"plan": plan.digest()}


def trained(merges: int, tokens: int) -> dict[str, Any]:
    """Facts of how far the global parameters have come: what `diloco eval` tells."""
    return {"merges": merges, "tokens": tokens}


def refuse_other(
    folder: Folder, number: int, facts: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    """Raises ConfigError unless the facts of a checkpoint are of our run: see
    `whose`."""
    lines = differences(ours["run"], facts["run"])
    if facts["run_id"] == ours["run_id"] and not lines:
        refuse_other_model(folder, number, facts, ours["plan"])
        return
    raise ConfigError(
        f"checkpoint {number} in {folder} is of run {facts['run_id']}, this is run "
        f"{ours['run_id']}; their configs differ in {'; '.join(lines) or 'nothing'} "
        f"(here: this run's). Give another folder as --checkpoints, or remove that one"
    )


def refuse_other_model(
    folder: Folder, number: int, facts: Mapping[str, Any], plan: str
) -> None:
    """Raises ConfigError unless the arrays of a checkpoint are the parameters of our
    model in order. plan: the digest of its fragments."""
    if lines := other_model(plan, facts["plan"]):
        raise ConfigError(
            f"checkpoint {number} in {folder} does not fit: {lines[0]}. Bring the code "
            f"back as it was when the run began"
        )


def _remove_unfinished(folder: Path, number: int) -> None:
    for path in folder.glob(f"{number}{ocp.utils.TMP_DIR_SUFFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path, number: int) -> None:
    """What a record log is cut off for must survive a power cut; orbax leaves most of
    its files, and the name of the folder, to the operating system."""
    whole = folder / str(number)
    for path in (*whole.rglob("*"), whole, folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
