"""Steps of docs/embed.md for loops that join and for the product's own.

As a program it is one host of an island of two, scripted: CONFIG COORDINATOR WORKDIR
WORLD INDEX own|joined PAGES.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

NAME = "pair"
FACTORY = """
import jax
import jax.numpy as jnp
import {page} as page

from diloco_jax.models.model import Model, named

shapes = jax.eval_shape(page.parameters, jax.random.key(0))
structure = jax.tree.structure(shapes)
names = named(jax.tree.unflatten(structure, range(structure.num_leaves)))


def loss(params, batch):
    rows = batch["tokens"]
    numbers, leaves = jax.tree.leaves(names), jax.tree.leaves(params)
    by_number = [leaf for _, leaf in sorted(zip(numbers, leaves, strict=True))]
    loss = page.loss_of(jax.tree.unflatten(structure, by_number), rows)
    return loss, {{"loss": loss, "tokens": jnp.float32(rows[:, 1:].size)}}


def model(run, island, layout):
    # An island with a mesh axis "fsdp" cuts the first axis.
    axes = jax.tree.map(lambda x: ("embed", *(None,) * (x.ndim - 1)), named(shapes))
    return Model(lambda key: named(page.parameters(key)), loss, axes)
"""


class PageSteps:
    """The page's steps of one island, whose moments and rows are cut as its parameters
    are. The rows follow from its batch and the number of the step: which positions it
    is leased depends on when the others ask."""

    def __init__(self, page, batch_size, params):
        import jax

        mesh = jax.tree.leaves(params)[0].sharding.mesh
        moments = jax.eval_shape(page.optimizer.init, params)
        params_lie, moments_lie = cut(mesh, params), cut(mesh, moments)
        whole, rows_lie = cut(mesh, 0.0), rows_of(mesh)
        self._step = jax.jit(
            page.step,
            donate_argnums=(0, 1),
            out_shardings=(params_lie, moments_lie, whole),
        )
        init = jax.jit(page.optimizer.init, out_shardings=moments_lie)
        self._moments = init(params)
        self._place = lambda rows: jax.make_array_from_callback(
            rows.shape, rows_lie, rows.__getitem__
        )
        self._numbers = np.random.default_rng(batch_size)
        self._shape = (batch_size, page.LENGTH + 1)

    def __call__(self, params, rate):
        rows = self._numbers.integers(0, 256, self._shape).astype(np.int32)
        rows = self._place(rows)
        params, self._moments, loss = self._step(params, self._moments, rows, rate)
        return params, loss


def cut(mesh, tree):
    """Shardings that cut each matrix along its first axis, over "fsdp" if the mesh has
    it, as the product cuts the parameters of `FACTORY`."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def of(leaf):
        fits = "fsdp" in mesh.shape and np.ndim(leaf) >= 2
        return NamedSharding(mesh, PartitionSpec("fsdp") if fits else PartitionSpec())

    return jax.tree.map(of, tree)


def rows_of(mesh):
    """The sharding of a batch's rows."""
    from jax.sharding import NamedSharding, PartitionSpec

    by = PartitionSpec("fsdp") if "fsdp" in mesh.shape else PartitionSpec()
    return NamedSharding(mesh, by)


def require_cut(params):
    """No device has a whole matrix."""
    import jax

    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim >= 2]
    assert matrices
    for leaf in matrices:
        (shard,) = leaf.addressable_shards
        assert 2 * shard.data.size == leaf.size, leaf.sharding


def joined_loop(page):
    def train(island, config):
        loop = island.loop
        batch_size = config.islands[island.name].batch_size
        steps = PageSteps(page, batch_size, loop.hand_over())
        while (ending := loop.until_step()) is None:
            rate, _ = loop.begin_step()
            loop.stepped(*steps(loop.hand_over(), rate))
        return ending

    return train


def step_in_replica(page, like):
    """The page's step, in place of the one that the product's loop makes."""
    from diloco_jax.island.device.like import LikeLeaves
    from diloco_jax.models.model import named

    leaves, made = LikeLeaves(like), {}

    def step(self, batch, rate):
        params = leaves.as_tree(self.params)
        if self not in made:
            rows = batch["tokens"].shape[0]
            made[self] = PageSteps(page, rows, params)
        params, loss = made[self](params, rate)
        self.params = named(params)
        return {"loss": loss, "tokens": 0.0, "skipped": False}

    return step


def main(
    path: str, address: str, workdir: str, world: str, index: str, how: str, pages: str
) -> int:
    """Train as one host, by the product's own loop or by one that joins."""
    from diloco_jax.before_jax import prepare_island
    from diloco_jax.config.loading import read_config_json

    config = read_config_json(Path(path))
    prepare_island(config.island(NAME))
    sys.path.insert(0, pages)
    import importlib

    import jax
    from host_process import script

    from diloco_jax.island.device import mesh as meshes
    from diloco_jax.island.device.exchange import Replica
    from diloco_jax.island.joined import JoinedHost
    from diloco_jax.island.main import TrainingHost
    from diloco_jax.island.world import WorldAddress, join_world, leave_world
    from diloco_jax.process import leave_at_once

    where = WorldAddress(address=world, index=int(index))
    hosts = join_world(where, 2, budget_s=240.0, meet_s=240.0)
    meshes.LARGE = 0  # Small matrices are cut, too.
    page = importlib.import_module("run")
    shapes = jax.eval_shape(page.parameters, jax.random.key(0))
    shardings = cut(meshes.make_mesh(config.island(NAME)), shapes)
    like = jax.tree.map(lambda x, lies: x.update(sharding=lies), shapes, shardings)
    Replica.step = step_in_replica(page, like)
    island = (
        TrainingHost(config, NAME, address, Path(workdir), 1, hosts)
        if how == "own"
        else JoinedHost(config, NAME, address, like, None, 1, hosts)
    )
    script(config, Path(workdir).parent, NAME)
    island.start()
    own = how == "own"
    params = island.loop.replica.params
    require_cut(params)
    ending = island.loop.run() if own else joined_loop(page)(island, config)
    island.stop(ending)
    island.close()
    leave_world()
    leave_at_once(ending.exit_code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
