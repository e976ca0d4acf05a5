"""The mesh, batch and kernels of one island."""

from __future__ import annotations

import dataclasses
from typing import Literal

from diloco_jax.config.fields import AT_LEAST_1, NOT_NEGATIVE, SECONDS, setting

AnchorMemory = Literal["device", "pinned_host"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandConfig:
    """Mesh, batch and kernels of one island. Islands may differ in all of them.

    Example:
      >>> from diloco_jax import IslandConfig
      >>> IslandConfig(batch_size=16, mesh_data=2, mesh_fsdp=4).devices
      8
    """

    batch_size: int = setting(
        8,
        AT_LEAST_1,
        help="Sequences per step, over all devices and accumulation rounds.",
    )
    accumulation: int = setting(
        1, AT_LEAST_1, help="Rounds of gradient accumulation that a batch is cut into."
    )
    mesh_data: int = setting(
        1,
        AT_LEAST_1,
        help="Devices over which sequences are spread, each with its own parameters.",
    )
    mesh_fsdp: int = setting(
        1, AT_LEAST_1, help="Devices over which sequences and parameters are spread."
    )
    mesh_tensor: int = setting(
        1, AT_LEAST_1, help="Devices over which the work on a sequence is spread."
    )
    hosts: int = setting(
        1,
        AT_LEAST_1,
        help="Host processes of the island, each with an equal share of its devices.",
    )
    remat: Literal["none", "full", "dots", "attention"] = setting(
        "none",
        help="Rematerialization, what the backward pass computes again of a layer: "
        "nothing, all, all but the products with weights, all but attention.",
    )
    compute_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", help="Type in which the model computes; parameters stay float32."
    )
    attention: Literal["auto", "dot_product", "splash"] = setting(
        "auto",
        help='Attention kernel; "splash" is one for TPUs, which "auto" takes there.',
    )
    loss_chunk: int | None = setting(
        None,
        NOT_NEGATIVE,
        help="Tokens of each sequence whose logits are in memory at a time; 0 = all, "
        "None = as many as the vocabulary allows.",
    )
    anchor_memory: AnchorMemory = setting(
        "device",
        help="Memory that holds anchors, bases and residuals between takes and "
        "adoptions.",
    )
    step_seconds: float = setting(
        0.0,
        SECONDS,
        help="Emulated step time: a step takes at least this long, and the coordinator "
        "believes no island that says it is twice as fast; 0 = as fast as it goes.",
    )
    stands_for: str = setting(
        "", help='What this island stands in for, for people to read: "v6e-16".'
    )
    topology: str = setting(
        "",
        help='TPU slice it runs on: "v5p:4x4x4", "v6e:16x16"; empty = the devices of '
        "this machine.",
    )

    @property
    def devices(self) -> int:
        """Devices of the island's mesh."""
        return self.mesh_data * self.mesh_fsdp * self.mesh_tensor

    @property
    def batch_multiple(self) -> int:
        """The number that `batch_size` must be a multiple of: each device has as many
        sequences in each round of accumulation."""
        return self.mesh_data * self.mesh_fsdp * self.accumulation
