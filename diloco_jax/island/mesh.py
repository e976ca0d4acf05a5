"""An island's mesh, and how parameters and batches lie on it.

Axes: "data" repeats the parameters, "fsdp" cuts them; sequences are cut over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diloco_jax.config import ConfigError, IslandConfig

MESH_AXES = ("data", "fsdp")

# Logical axis -> mesh axis. A tensor is cut once, on the first of these axes that it
# has and whose size the mesh axis divides; without one it lies whole on each device.
RULES = {
    "embed": "fsdp",
    "mlp": "fsdp",
    "vocab": "fsdp",
    "heads": "fsdp",
    "kv_heads": "fsdp",
    "head_dim": "fsdp",
}


def make_mesh(
    config: IslandConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The island's mesh of the first `config.devices` devices, with Auto axes.

    Raises:
      ConfigError: fewer devices than that.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < config.devices:
        raise ConfigError(
            f"mesh_data * mesh_fsdp = {config.mesh_data} * {config.mesh_fsdp} = "
            f"{config.devices} devices, but this process has {len(devices)}; lower "
            f"them, or for virtual CPU devices set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={config.devices} (or "
            f"jax_num_cpu_devices) before jax starts"
        )
    grid = np.array(devices[: config.devices], dtype=object)
    return Mesh(
        grid.reshape(config.mesh_data, config.mesh_fsdp),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def param_shardings(
    mesh: Mesh, axes: dict[str, Any], shapes: dict[str, Any]
) -> dict[str, Any]:
    """A NamedSharding for every parameter.

    Args:
      mesh: the island's mesh.
      axes: nested dict of tuples of logical axis names.
      shapes: the same structure of anything with a `.shape`.
    """
    return {
        name: param_shardings(mesh, axes[name], value)
        if isinstance(value, dict)
        else NamedSharding(mesh, _spec(mesh, axes[name], value.shape))
        for name, value in shapes.items()
    }


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sequences, the leading axis, over all devices."""
    return NamedSharding(mesh, _partition(MESH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, _partition())


def _spec(mesh: Mesh, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Vectors stay whole: gathering them costs more than they weigh."""
    if len([name for name in names if name != "layers"]) < 2:
        return _partition()
    for rule, mesh_axis in RULES.items():
        if rule in names and shape[names.index(rule)] % mesh.shape[mesh_axis] == 0:
            position = names.index(rule)
            return _partition(*(None,) * position, mesh_axis)
    return _partition()


def _partition(*axes: str | tuple[str, ...] | None) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]
