"""Checkpoints: orbax behind a few functions.

A checkpoint is a numbered folder with trees of arrays and a JSON object. It appears
under its number only when all of it is written. Folders are local, or
gs://BUCKET/FOLDER, not s3://. Several hosts write one checkpoint together, each the
shards that it holds; the reader may have another mesh and another number of hosts.

orbax takes as long as jax to import, and islands alone need it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from etils import epath
from etils.epath import Path as Folder

from diloco_jax import files, run_files
from diloco_jax.config import (
    ConfigError,
    Placement,
    RunConfig,
    differences,
    shared_fields,
)
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.files import is_bucket, sync_path
from diloco_jax.models.build import other_model

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

ISLANDS = "islands"


def snapshots_folder(placement: Placement, workdir: Path) -> Folder:
    """Return the folder of the coordinator's snapshots."""
    return _root(placement.checkpoints, workdir) / "coordinator"


def island_folder(placement: Placement, workdir: Path, island: str) -> Folder:
    """Return the folder of an island's checkpoints."""
    return _root(placement.islands_checkpoints, workdir) / ISLANDS / island


def _root(asked: str, workdir: Path) -> Folder:
    # A folder of checkpoints may hold nothing else: in a bucket, orbax takes other
    # folders there for unfinished checkpoints, and removes them.
    return epath.Path(asked or workdir / run_files.CHECKPOINTS)


def open_folder(
    folder: Folder | Path, keep: int, *, hosts: int = 1
) -> ocp.CheckpointManager:
    """Open a folder of checkpoints that keeps the newest `keep`; make it if missing.

    hosts: number of hosts that write and read each checkpoint together, as processes of
    one `jax.distributed` world. A writer removes the unfinished checkpoints it finds.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    folder = epath.Path(folder)
    if not is_bucket(str(folder)):  # etils would make a bucket's path a local one.
        folder = folder.absolute()
    together = ocp.options.MultiprocessingOptions()
    if hosts > 1:
        # With a name, the hosts meet through the world's store. Otherwise orbax would
        # run a collective between those of the inner steps.
        together = ocp.options.MultiprocessingOptions(
            active_processes=set(range(hosts)), barrier_sync_key_prefix=folder.name
        )
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        create=False,
        cleanup_tmp_directories=True,
        multiprocessing_options=together,
    )
    return ocp.CheckpointManager(folder, options=options)


def save(
    manager: ocp.CheckpointManager,
    number: int,
    trees: Mapping[str, Any],
    facts: dict[str, Any],
) -> None:
    """Write checkpoint `number`, trees of arrays by name; it is durable on return.

    A failure leaves nothing of the checkpoint in a local folder. A full disk raises an
    OSError that names the folder."""
    import orbax.checkpoint as ocp

    arrays = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
    args = ocp.args.Composite(**arrays, facts=ocp.args.JsonSave(facts))
    local = not is_bucket(str(manager.directory))
    try:
        manager.save(number, args=args, force=True)
        manager.wait_until_finished()
    except Exception as error:
        # Otherwise a full disk would stay full.
        if local and jax.process_index() == 0:
            torn = f"{number}{ocp.utils.TMP_DIR_SUFFIX}*"
            for path in Path(manager.directory).glob(torn):
                shutil.rmtree(path, ignore_errors=True)
        # tensorstore reports a full disk as a ValueError.
        reason = os.strerror(errno.ENOSPC)
        if local and reason in str(error):
            raise OSError(errno.ENOSPC, reason, str(manager.directory)) from error
        raise
    if local:
        # The record log is cut off once the checkpoint exists, which must survive a
        # power cut. orbax leaves most of its files, and the folder's name, to the
        # operating system.
        folder = Path(manager.directory)
        whole = folder / str(number)
        for path in (*whole.rglob("*"), whole, folder):
            sync_path(path)


def _read(manager: ocp.CheckpointManager, number: int, args: Any) -> Any:
    """Return the parts of a checkpoint; raise ConfigError if it cannot be read."""
    try:
        return manager.restore(number, args=args)
    except Exception as error:
        # Errors of orbax, tensorstore and JSON are of many kinds, and long.
        folder = manager.directory
        files.raise_if_away(folder, error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ConfigError(
            f"checkpoint {number} in {folder} cannot be read ({reason}); restore it "
            f"from a copy, or remove it: the island continues from an older one, or "
            f"without"
        ) from error


def restore(
    manager: ocp.CheckpointManager, number: int, name: str, like: Any = None
) -> Any:
    """Return one tree of arrays of a checkpoint, shaped and placed as in `like` (None:
    as they were saved)."""
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(**{name: ocp.args.StandardRestore(like)})
    return _read(manager, number, args)[name]


def read_facts(manager: ocp.CheckpointManager, number: int) -> dict[str, Any]:
    """Return the JSON object of a checkpoint."""
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(facts=ocp.args.JsonRestore())
    facts: dict[str, Any] = _read(manager, number, args)["facts"]
    return facts


def newest(manager: ocp.CheckpointManager) -> int | None:
    """Return the number of the newest complete checkpoint, or None."""
    number: int | None = manager.latest_step()
    return number


def whose(run: RunConfig, run_id: str, plan: FragmentPlan) -> dict[str, Any]:
    """Return the facts that tie a checkpoint to this run and model."""
    return {
        "run_id": run_id,
        "fingerprint": run.fingerprint(),
        "run": shared_fields(run),
        **of_model(plan),
    }


def of_model(plan: FragmentPlan) -> dict[str, Any]:
    """Return the fact that identifies the order of a checkpoint's arrays; see
    `refuse_other_model`."""
    return {"plan": plan.digest()}


def trained(merges: int, tokens: int) -> dict[str, Any]:
    """Return the progress of the global parameters, which `diloco eval` shows."""
    return {"merges": merges, "tokens": tokens}


def refuse_other(
    folder: Folder, number: int, facts: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    """Raise ConfigError unless a checkpoint belongs to our run; see `whose`.

    It may have a lower `total_tokens`, from before the run was extended.
    """
    theirs, tokens = facts["run"], ours["run"]["total_tokens"]
    if theirs["total_tokens"] < tokens:
        theirs = {**theirs, "total_tokens": tokens}
    lines = differences(ours["run"], theirs)
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
    """Raise ConfigError unless the arrays of a checkpoint are our model's parameters,
    in its order. plan: the digest of the model's fragments."""
    if lines := other_model(plan, facts["plan"]):
        raise ConfigError(
            f"checkpoint {number} in {folder} does not fit: {lines[0]}. Bring the code "
            f"back as it was when the run began"
        )
