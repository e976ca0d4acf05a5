"""Equal islands in one program that merge parameters and moments, by the mean in f32.

No config of the product has this: moments never leave an island. With moments merged as
rarely as never it is synchronous DiLoCo that merges everything at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import Config
from diloco_jax.config.resolving import resolve
from diloco_jax.data.loading import load_data
from diloco_jax.data.reader import BatchReader
from diloco_jax.evaluation import as_json, whole_validation
from diloco_jax.island.device.step import TrainState
from diloco_jax.models.build import build_plan
from diloco_jax.simulation.bodies import trainer_of
from diloco_jax.simulation.emulation_options import EmulationOptions
from diloco_jax.simulation.laboratory import Lockstep
from diloco_jax.weights.first import first_params


def run(
    config: Config, moments_every: int, power: float, early: Sequence[int] = ()
) -> dict[str, Any]:
    """Train to the end on the rows and at the rates of an emulation of this config;
    return what `baseline.run` does of it.

    Parameters are merged at `merge_steps`, moments every `moments_every`.
    """
    config = resolve(config)
    run, islands = config.run, len(config.islands)
    model, trainer = trainer_of(run, next(iter(config.islands.values())))
    reader = BatchReader(
        load_data(run).index(run.seed), trainer.fields, run.sequence_length
    )
    tape = Lockstep(config, EmulationOptions(), build_plan(run, model))
    acts = [act.own for act in tape.acts if act.kind == "train"]
    steps = len(acts)
    at = merge_steps(steps, run.sync.cycle, power, early)

    def spread(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, (islands, *leaf.shape)).copy()

    def mean(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf.mean(0, dtype=leaf.dtype), leaf.shape)

    @jax.jit
    def step(state: TrainState, batch: Any, rates: Any) -> TrainState:
        each = jax.vmap(trainer.update, in_axes=(0, 0, 0, None))
        return each(state, batch, rates, trainer.frozen)[0]

    merged = jax.jit(lambda tree: jax.tree.map(mean, tree))
    first = first_params(run, model)
    state: TrainState = jax.tree.map(
        spread, TrainState(first, trainer.init_inner(trainer.place_params(first)))
    )
    with jax.set_mesh(trainer.mesh):
        for number, (positions, rates) in enumerate(acts, start=1):
            batch = {
                name: np.asarray(rows).reshape(islands, -1, *rows.shape[1:])
                for name, rows in reader.batch(positions.reshape(-1)).items()
            }
            params, moments = step(state, batch, np.asarray(rates, np.float32))
            if number in at:
                params = merged(params)
            if number % moments_every == 0:
                moments = merged(moments)
            state = TrainState(params, moments)
    params = trainer.place_params(jax.tree.map(lambda leaf: leaf[0], state.params))
    found = as_json(whole_validation(config, trainer, params))
    return {**found, "tokens": steps * acts[0][0].size * run.sequence_length}


def merge_steps(
    steps: int, cycle: int, power: float, early: Sequence[int] = ()
) -> set[int]:
    """Return the steps after which there is a merge: K of them, every `cycle` steps and
    at the end; merge k after (k / K)^power of the steps; or, given (every, until) as
    `early`, every so many steps until then, and the others evenly up to the end."""
    merges = -(-steps // cycle)
    if early:
        every, until = early
        first = set(range(every, until + 1, every))
        left = merges - len(first)
        rest = (steps - until) / left
        return first | {until + round(rest * k) for k in range(1, left + 1)}
    if power == 1:
        return {*range(cycle, steps, cycle), steps}
    return {round(steps * (k / merges) ** power) for k in range(1, merges + 1)}
