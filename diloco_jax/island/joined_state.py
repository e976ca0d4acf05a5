"""The part of an island that a train loop keeps in its own checkpoint.

Parameters, anchors and data are the coordinator's: a restarted loop gets them as every
island does. The loop alone has its moments and the residuals of the error feedback. It
saves the moments itself. The residuals are here, with the facts that tell whether they
are still valid. Everything is an array, so any checkpoint library can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diloco_jax.config import ConfigError
from diloco_jax.island.checkpoints import undisturbed
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.device.replica import Restored
from diloco_jax.models.model import named
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import Identity

RESIDUALS = "residuals"
_FACTS = ("run", "island", "incarnation", "steps", "versions", "outstanding")


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
            fragment: tuple(
                held.kind.read(held.leaf(tree), held.index)
                for held in exchange.held(fragment)
            )
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
