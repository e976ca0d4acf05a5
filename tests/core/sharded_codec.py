"""Run by test_codec_contract.py in a process with four virtual devices: prints what
it saw of the codecs that are named.

A piece of shape (64, 64) has a (2, 2) grid of tiles, one of shape (256, 96) has more;
both are encoded and decoded with shards that end on tile boundaries.
"""

import json
import re
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from diloco_jax.core.codecs import encode_with_feedback, get_codec

COLLECTIVE = re.compile(
    r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|partition-id"
)
CASES = [((64, 64), (2, 2), ("x", "y")), ((256, 96), (4, 1), ("x", None))]


def check(name: str, case: int, axis_type: AxisType) -> dict[str, object]:
    """Compiled text and bytes of one case, against those without sharding."""
    shape, mesh_shape, spec = CASES[case]
    devices = np.array(jax.devices()).reshape(mesh_shape)
    mesh = Mesh(devices, ("x", "y"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    codec = get_codec(name)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    whole, whole_rest = encode_with_feedback(codec, x, np.zeros_like(x))
    sharded = jax.device_put(x, sharding)
    zeros = jax.device_put(np.zeros_like(x), sharding)
    with jax.set_mesh(mesh):
        encode = encode_with_feedback.lower(codec, sharded, zeros).compile()
        octets, rest = encode(sharded, zeros)
        decode = (
            jax.jit(codec.decode, static_argnums=1, out_shardings=sharding)
            .lower(octets, shape)
            .compile()
        )
        back = decode(octets)
    return {
        "case": f"{name} {shape} over {mesh_shape}, {axis_type}",
        "shards": len({str(shard.index) for shard in octets.addressable_shards}),
        "collectives": sorted(
            set(COLLECTIVE.findall(encode.as_text() + decode.as_text()))
        ),
        "same_bytes": bool(np.array_equal(octets, whole)),
        "same_rest": bool(np.array_equal(rest, whole_rest)),
        "same_values": bool(np.array_equal(back, codec.decode(whole, shape))),
    }


if __name__ == "__main__":
    types = (AxisType.Auto, AxisType.Explicit)
    runs = [(name, *each) for name in sys.argv[1:] for each in enumerate(types)]
    print(json.dumps([check(*run) for run in runs]))
