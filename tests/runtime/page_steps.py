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

from diloco_jax.models.model import Model, named, plain_axes

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
    axes = plain_axes(named(shapes))
    return Model(lambda key: named(page.parameters(key)), loss, axes)
"""


class PageSteps:
    """The page's steps of one island. Its rows follow from its batch and the number of
    the step: which positions it is leased depends on when the others ask."""

    def __init__(self, page, batch_size, params):
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.tree.leaves(params)[0].sharding.mesh
        lies = NamedSharding(mesh, PartitionSpec())
        self._step = jax.jit(page.step, out_shardings=lies)
        self._moments = jax.jit(page.optimizer.init, out_shardings=lies)(params)
        self._place = lambda rows: jax.make_array_from_callback(
            rows.shape, lies, rows.__getitem__
        )
        self._numbers = np.random.default_rng(batch_size)
        self._shape = (batch_size, page.LENGTH + 1)

    def __call__(self, params, rate):
        rows = self._numbers.integers(0, 256, self._shape).astype(np.int32)
        rows = self._place(rows)
        params, self._moments, loss = self._step(params, self._moments, rows, rate)
        return params, loss


def joined_loop(page):
    def train(island, config):
        loop = island.loop
        batch_size = config.islands[island._host.name].batch_size
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
    from diloco_jax.config.loading import read_config_json
    from diloco_jax.island.environment import prepare_island

    config = read_config_json(Path(path))
    prepare_island(config.island(NAME))
    sys.path.insert(0, pages)
    import importlib

    import jax
    from host_process import script
    from jax.sharding import NamedSharding, PartitionSpec

    from diloco_jax.island.device.mesh import make_mesh
    from diloco_jax.island.device.replica import Replica
    from diloco_jax.island.host import Host
    from diloco_jax.island.hosts.follower import Follower
    from diloco_jax.island.hosts.meeting import WorldAddress
    from diloco_jax.island.hosts.world import abandon_world, join_world, leave_world
    from diloco_jax.island.joined_host import JoinedHost
    from diloco_jax.island.main import LeadingHost

    where = WorldAddress(address=world, index=int(index))
    hosts = join_world(where, 2, budget_s=240.0, meet_s=240.0)
    page, mesh = importlib.import_module("run"), make_mesh(config.island(NAME))
    everywhere = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
        jax.eval_shape(page.parameters, jax.random.key(0)),
    )
    Replica.step = step_in_replica(page, like)
    host = (
        Host(config, NAME, address, Path(workdir))
        if how == "own"
        else JoinedHost(config, NAME, address, like, None)
    )
    script(config)
    leads = hosts.index == 0
    island = LeadingHost(host, 1, hosts) if leads else Follower(host, hosts)
    island.start()
    own = how == "own"
    ending = island.loop.run() if own else joined_loop(page)(island, config)
    island.stop(ending)
    island.close()
    leave_world()
    abandon_world(ending.exit_code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
