"""The layout of activations and weights on a mesh, as a model may ask for it.

A model names the axes of its arrays, and the island's rules turn names into mesh axes.
Without constraints the partitioner is free to gather activations where gathering the
weights is cheaper, and to leave a weight's gradient whole on every device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Names = tuple[str | None, ...]
"""Logical names of an array's axes."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with Auto axes, and the mesh axes that cut an axis, by logical name."""

    mesh: Mesh
    rules: Mapping[str, tuple[str, ...]]
    """Rules for activations, and for weights in use."""
    at_rest: Callable[[Names, tuple[int, ...]], PartitionSpec]
    """Function of a weight's names and shape that returns its cut between its uses."""

    @classmethod
    def of_one_device(cls) -> Layout:
        """Return the layout on the default device alone."""
        devices = np.array(jax.devices()[:1], dtype=object)
        mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
        return cls(mesh, {}, lambda names, shape: PartitionSpec())  # type: ignore[no-untyped-call]

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices: "cpu", "gpu", "tpu"."""
        platform: str = self.mesh.devices.flat[0].platform
        return platform

    def ways(self, name: str | None) -> int:
        """Return the number of parts into which the rules cut an axis of that name."""
        return math.prod(
            self.mesh.shape[axis] for axis in self.rules.get(name or "", ())
        )

    def spec(self, names: Names, shape: tuple[int, ...]) -> PartitionSpec:
        """Cut each axis by the rules. An axis stays whole if it has no rule, or if the
        mesh axes do not divide it."""
        return PartitionSpec(*map(self._cut, names, shape))  # type: ignore[no-untyped-call]

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """Return x, cut as `spec` says."""
        return x if self.mesh.size == 1 else self._cut_by(x, self.spec(names, x.shape))

    def gather(self, weight: jax.Array, names: Names) -> jax.Array:
        """Gather a weight for its use, cut as `spec` says, from the devices' parts.

        Its gradient is cut like the weight at rest: a device gets the sum of its own
        part. The gradient of `constrain` would be summed whole on every device."""
        if self.mesh.size == 1:
            return weight
        rest = self.at_rest(names, weight.shape)

        @jax.custom_vjp
        def gathered(weight: jax.Array) -> jax.Array:
            return self.constrain(weight, names)

        gathered.defvjp(
            lambda weight: (self.constrain(weight, names), None),
            lambda _, gradient: (self._cut_by(gradient, rest),),
        )
        used: jax.Array = gathered(weight)
        return used

    def _cut_by(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        sharding = NamedSharding(self.mesh, spec)
        cut: jax.Array = jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
        return cut

    def _cut(self, name: str | None, extent: int) -> tuple[str, ...] | None:
        ways = self.ways(name)
        return self.rules[name] if name and ways > 1 and extent % ways == 0 else None
