"""An island's checkpoints: written beside its steps, read when it comes back.

A checkpoint has the inner optimizer's moments and the codec residuals, and says at
which steps and versions the island was. A returned island takes its parameters and
anchors from the coordinator: its own would hold steps that may never have been merged,
and training on from them would add steps that no delta accounts for. Moments carry no
steps, so they are restored unchanged. A residual
is what a merged take left unsaid. It is restored where no take and no merge came after
it, and is zero elsewhere, since a later take has sent it already.

A checkpoint also has the records that no coordinator had acknowledged. The returned
island passes them on: replay needs all that led to the moments.

At a boundary the arrays are only copied to host memory; a thread writes the copies.
Every host of the island writes the shards that it holds, so all must reach the same
boundary, which host 0 decides (`hosts.py`).

A train loop of the user's has a checkpoint of its own. It saves its moments itself;
`saved_state` returns the residuals for it, with the facts that tell whether they are
still valid. Everything is an array, so any checkpoint library can hold it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils.epath import Path as Folder

from diloco_jax import checkpoint, files
from diloco_jax.config import Config, ConfigError
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.island.device.exchange import Exchange, Restored
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.world import Hosts
from diloco_jax.models.model import named
from diloco_jax.protocol.messages import Record, Version, to_pass_on
from diloco_jax.wire.bulk import Identity

logger = logging.getLogger(__name__)

RESIDUALS = "residuals"
_FACTS = ("run", "island", "incarnation", "steps", "versions", "outstanding")


class Checkpoints:
    """Checkpoints of one island, in one folder, for one incarnation and host.

    Call `open`, then `restore`, then `due` and `save` at boundaries, and `close` at the
    end.
    """

    def __init__(self, config: Config, name: str, folder: Folder) -> None:
        """Raise ConfigError if a folder that was asked for cannot be written."""
        placement = config.placement
        self._every_s = placement.checkpoint_every_s
        self._keep = placement.checkpoints_kept
        self._explicit = bool(placement.islands_checkpoints)
        self._config, self._name, self._folder = config, name, folder
        self._pin_s = placement.deadlines.pin_s
        self._hosts = config.island(name).hosts
        self._due = time.monotonic() + self._every_s
        self._saved: tuple[int, set[int]] = (0, set())
        """Steps, and outstanding fragments, of the checkpoint that is written or about
        to be."""
        self._writing: threading.Thread | None = None
        """The newest checkpoint's."""
        self._final = False
        self._manager: Any = None
        self._found: dict[str, Any] | None = None
        self._number = 0
        self._whose: dict[str, Any] = {}
        if self._every_s and self._explicit:
            files.require_access(folder)
        elif self._every_s and placement.checkpoints:
            logger.info(
                "checkpoints of island %s stay in %s: orbax cannot write to %s",
                name,
                folder,
                placement.checkpoints,
            )

    def open(self, identity: Identity, plan: FragmentPlan, hosts: Hosts) -> None:
        """Look for checkpoints in the folder. All hosts must call it.

        Raises ConfigError if there are checkpoints of another run, or if the hosts do
        not see the same folder that was asked for; HostsError if a host does not
        answer.
        """
        if not self._every_s:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if hosts.others and not self._one_folder(hosts, identity.session):
            what = f"the {hosts.count} hosts of island {self._name!r} do not share"
            if self._explicit:
                raise ConfigError(
                    f"{what} the folder {self._folder}; give a shared one as "
                    f"--checkpoints, such as gs://BUCKET/FOLDER"
                )
            logger.warning(
                "%s %s: no checkpoints are written; give --checkpoints gs://BUCKET/"
                "FOLDER, or a folder that they share",
                what,
                self._folder,
            )
            self._every_s = 0.0
            return
        self._whose = {
            **checkpoint.whose(self._config.run, identity.run_id, plan),
            "island": self._name,
            "incarnation": identity.incarnation,
            "config": dataclasses.asdict(self._config.island(self._name)),
        }
        self._manager = checkpoint.open_folder(
            self._folder, self._keep, hosts=self._hosts
        )
        number = checkpoint.newest(self._manager)
        if number is not None:
            self._number = number
            self._found = checkpoint.read_facts(self._manager, number)
            checkpoint.refuse_other(self._folder, number, self._found, self._whose)

    def restore(
        self, trainer: Trainer, exchange: Exchange, versions: Sequence[Version]
    ) -> Restored | None:
        """Return the newest checkpoint's arrays for an island that begins at these
        versions; None if there is no checkpoint. All hosts must call it."""
        found = self._found
        if found is None:
            return None
        began = time.monotonic()
        like = trainer.abstract_state().opt_state
        leaves, structure = jax.tree.flatten(like)
        moments = checkpoint.restore(self._manager, self._number, "moments", leaves)
        before = [Version(*version) for version in found["versions"]]
        kept = undisturbed(before, versions, found["outstanding"])
        residuals: dict[int, tuple[jax.Array, ...]] = {}
        if kept and self._config.run.sync.error_feedback:
            saved = checkpoint.restore(
                self._manager, self._number, "residuals", exchange.like_residuals()
            )
            residuals = {f: exchange.together(f, _copied(saved[f])) for f in kept}
        logger.info(
            "restored the moments of incarnation %d after step %d, and the residuals "
            "of %d of %d fragments, in %.1f s",
            found["incarnation"],
            found["steps"],
            len(residuals),
            len(versions),
            time.monotonic() - began,
        )
        return Restored(
            incarnation=found["incarnation"],
            steps=found["steps"],
            moments=jax.tree.unflatten(structure, _copied(moments)),
            residuals=residuals,
            unheard=found.get("unheard", ()),
        )

    def due(self) -> bool:
        """Tell if the next checkpoint is to be written now. It returns True once for
        each, and not while one is being written."""
        now = time.monotonic()
        due = bool(self._every_s) and now >= self._due
        due = due and not (self._writing and self._writing.is_alive())
        if due:
            # Decided here, not at `save`, which may come some boundaries later.
            self._due = now + self._every_s
        return due

    def save(
        self,
        trees: dict[str, Any],
        *,
        steps: int,
        versions: Sequence[Version],
        outstanding: Sequence[int],
        unheard: Iterable[Record] = (),
        final: bool = False,
    ) -> None:
        """Write the state after so many steps, on a thread. This returns before
        anything is written; the arguments may be donated at once.

        trees: see `Replica.trees`. outstanding: fragments with a take that may still be
        merged. unheard: records that are not acknowledged. final: the incarnation ends
        with it, and `close` is to wait for it.
        """
        self._final = final
        if not self._every_s:
            return
        if not steps:
            # There is nothing to write yet: the checkpoint stays due.
            self._due = time.monotonic()
            return
        if (steps, set(outstanding)) == self._saved:
            return
        copies = _to_host(trees)
        facts = {
            **self._whose,
            "steps": steps,
            "versions": [list(version) for version in versions],
            "outstanding": list(outstanding),
            "unheard": list(to_pass_on(self._whose["incarnation"], unheard)),
        }
        writing = threading.Thread(
            target=self._write,
            args=(self._writing, self._number + 1, copies, facts),
            name="checkpoints",
            daemon=True,
        )
        try:
            writing.start()
        except RuntimeError as error:  # There is no thread to be had just now.
            logger.error("no checkpoint was written: %s; the next is tried", error)
            return
        self._number += 1
        self._saved, self._writing = (steps, set(outstanding)), writing

    def close(self, timeout_s: float) -> None:
        """Wait for the final checkpoint, if there is one, for at most `timeout_s`."""
        if self._writing is not None:
            self._writing.join(timeout_s if self._final else 0.0)

    def _write(
        self,
        before: threading.Thread | None,
        number: int,
        trees: dict[str, Any],
        facts: dict[str, Any],
    ) -> None:
        """Write a checkpoint after the one before. A failure must not end the run: the
        next one may succeed."""
        if before is not None:
            before.join()
        began = time.monotonic()
        try:
            checkpoint.save(self._manager, number, trees, facts)
        except Exception as error:
            logger.error(
                "checkpoint %d was not written, training goes on: %s",
                number,
                files.cannot_write(self._folder, error),
            )
            return
        logger.info(
            "checkpoint %d, after step %d, is written (%.1f s)",
            number,
            facts["steps"],
            time.monotonic() - began,
        )

    # ---- the other hosts --------------------------------------------------------

    def _one_folder(self, hosts: Hosts, session: str) -> bool:
        """Tell if all hosts see what host 0 puts into the folder."""
        mark = self._folder / f"meeting-{session}"
        if hosts.index > 0:
            self._hear(hosts, "folder/marked")
            hosts.tell(f"folder/{hosts.index}", b"yes" if mark.exists() else b"no")
            return self._hear(hosts, "folder/agreed") == b"yes"
        mark.write_text("may be deleted")
        hosts.tell("folder/marked", b"")
        answers = [self._hear(hosts, f"folder/{host}") for host in hosts.others]
        mark.unlink(missing_ok=True)
        agreed = b"no" if b"no" in answers else b"yes"
        hosts.tell("folder/agreed", agreed)
        return agreed == b"yes"

    def _hear(self, hosts: Hosts, key: str) -> bytes:
        return hosts.require(
            key,
            self._pin_s,
            f"host {hosts.index} of island {self._name!r} did not hear {key!r} within "
            f"{self._pin_s:g} s: another host hangs or is gone",
        )


def undisturbed(
    saved: Sequence[Version], now: Sequence[Version], outstanding: Collection[int]
) -> list[int]:
    """Return the fragments whose saved residuals still hold: no take and no merge came
    later.

    Args:
      saved, now: versions by fragment, in the checkpoint and at present.
      outstanding: fragments that had an outstanding take when they were saved.
    """
    return [
        fragment
        for fragment, (before, version) in enumerate(zip(saved, now, strict=True))
        if before == version and fragment not in outstanding
    ]


def _to_host(trees: Any) -> Any:
    """Copy into host memory. The copying goes on after this returns, and reads the
    values from before anything that is dispatched later."""
    return _copied(trees, "pinned_host")


def _copied(arrays: Any, memory: str | None = None) -> Any:
    """Copy arrays to this kind of memory, so that they may be donated: on a CPU, those
    that were read may lie in the reader's memory.

    They are copied shard by shard. As a whole, arrays of several hosts would be copied
    by a program, which is compiled for each shape.
    """

    def copied(array: jax.Array) -> jax.Array:
        shards = [shard.data for shard in array.addressable_shards]
        there = [shard.sharding for shard in shards]
        lies = array.sharding
        if memory is not None:
            there = [place.with_memory_kind(memory) for place in there]
            lies = lies.with_memory_kind(memory)
        copies = jax.device_put(shards, there, may_alias=False)
        return jax.make_array_from_single_device_arrays(array.shape, lies, copies)

    return jax.tree.map(copied, arrays)


def saved_state(
    exchange: Exchange,
    leaves: LikeLeaves,
    identity: Identity,
    *,
    steps: int,
    versions: Sequence[Version],
    outstanding: Sequence[int],
) -> dict[str, Any]:
    """Return the state after `steps` steps. All hosts call it.

    outstanding: fragments with a take that may still be merged.
    """
    doubtful = np.zeros(len(versions), np.bool_)
    doubtful[list(outstanding)] = True
    state: dict[str, Any] = {
        "run": _octets(identity.run_id),
        "island": _octets(identity.island),
        "incarnation": np.int64(identity.incarnation),
        "steps": np.int64(steps),
        "versions": np.array(versions, np.int64),
        "outstanding": doubtful,
    }
    if exchange.feeds_back:
        tree = leaves.as_tree(exchange.residuals(leaves.zeros()))
        # By name: a checkpoint may lose what the loop's tree is made of.
        state[RESIDUALS] = named(tree)
    return state


def restored_state(
    state: Mapping[str, Any],
    exchange: Exchange,
    leaves: LikeLeaves,
    versions: Sequence[Version],
) -> Restored:
    """Return the part of a state that still holds for an island that begins at these
    versions. All hosts call it.

    Raises ValueError if the residuals are not as `like` in names and shapes.
    """
    before = [Version(*map(int, version)) for version in np.asarray(state["versions"])]
    outstanding = np.flatnonzero(np.asarray(state["outstanding"]))
    residuals: dict[int, tuple[jax.Array, ...]] = {}
    if exchange.feeds_back:
        tree = leaves.placed(state[RESIDUALS])
        residuals = {
            fragment: exchange.values(fragment, tree)
            for fragment in undisturbed(before, versions, outstanding)
        }
    return Restored(
        incarnation=int(state["incarnation"]),
        steps=int(state["steps"]),
        moments=None,
        residuals=residuals,
    )


def require_own(
    state: Mapping[str, Any], identity: Identity, exchange: Exchange, fragments: int
) -> None:
    """Raise ConfigError unless the state is of an earlier attempt of this island in
    this run."""
    wanted = {*_FACTS, RESIDUALS} if exchange.feeds_back else {*_FACTS}
    if lacking := sorted(wanted - set(state)):
        raise ConfigError(
            f"state has {', '.join(sorted(state)) or 'nothing'} and lacks "
            f"{', '.join(lacking)}; give what island.state() returned, whole"
        )
    for what, here in (("run", identity.run_id), ("island", identity.island)):
        there = bytes(np.asarray(state[what])).decode()
        if there != here:
            raise ConfigError(
                f"state is of {what} {there!r}, this is {what} {here!r}; join without "
                f"a state, with fresh moments"
            )
    if (before := int(state["incarnation"])) >= identity.incarnation:
        raise ConfigError(
            f"state is of incarnation {before}, this one is {identity.incarnation}; "
            f"the incarnation rises with every attempt"
        )
    if (saved := len(np.asarray(state["versions"]))) != fragments:
        raise ConfigError(
            f"state has versions of {saved} fragments, the run has {fragments}; join "
            f"without a state, with fresh moments"
        )


def _octets(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
