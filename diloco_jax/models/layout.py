"""How activations, and weights in use, lie on a mesh: what a model may ask of it.

A model names the axes of its arrays, the island's rules turn names into mesh axes.
Without constraints the partitioner is free to gather activations where gathering the
weights is cheaper.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Names = tuple[str | None, ...]
"""The logical names of an array's axes."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with Auto axes, and by logical name the mesh axes that cut an axis."""

    mesh: Mesh
    rules: Mapping[str, tuple[str, ...]]

    @classmethod
    def of_one_device(cls) -> Layout:
        """The default device alone."""
        devices = np.array(jax.devices()[:1], dtype=object)
        return cls(Mesh(devices, ("data",), axis_types=(AxisType.Auto,)), {})

    @property
    def platform(self) -> str:
        """What the mesh's devices are: "cpu", "gpu", "tpu"."""
        platform: str = self.mesh.devices.flat[0].platform
        return platform

    def ways(self, name: str | None) -> int:
        """In how many parts an axis of that name is cut, if that divides it."""
        return math.prod(
            self.mesh.shape[axis] for axis in self.rules.get(name or "", ())
        )

    def spec(self, names: Names, shape: tuple[int, ...]) -> PartitionSpec:
        """Cuts each axis as the rules say; one without a rule stays whole, and so does
        one that the mesh axes do not divide."""
        return PartitionSpec(*map(self._cut, names, shape))  # type: ignore[no-untyped-call]

    def constrain(self, x: jax.Array, names: Names) -> jax.Array:
        """x, cut as `spec` says."""
        if self.mesh.size == 1:
            return x
        sharding = NamedSharding(self.mesh, self.spec(names, x.shape))
        cut: jax.Array = jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
        return cut

    def _cut(self, name: str | None, extent: int) -> tuple[str, ...] | None:
        ways = self.ways(name)
        return self.rules[name] if name and ways > 1 and extent % ways == 0 else None
