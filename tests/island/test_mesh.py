"""Which mesh axis cuts which axis of a parameter."""

import pytest
from jax.sharding import AbstractMesh

from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device.mesh import MESH_AXES, layout, param_spec, tile_spec
from diloco_jax.models import transformer
from diloco_jax.models.presets import preset

MLP = ("layers", "embed", "mlp")
QUERY = ("layers", "embed", "heads", "head_dim")


def mesh(fsdp: int = 1, tensor: int = 1, expert: int = 1) -> dict[str, int]:
    return {"data": 2, "fsdp": fsdp, "expert": expert, "tensor": tensor}


@pytest.mark.parametrize(
    ("names", "shape", "sizes", "spec"),
    [
        # Tiles of (64, 128) are (32, 32): a grid of 2 x 4.
        (MLP, (5, 64, 128), mesh(), (None, None, None)),
        (MLP, (5, 64, 128), mesh(fsdp=2), (None, "fsdp", None)),
        (MLP, (5, 64, 128), mesh(fsdp=4), (None, None, "fsdp")),
        (MLP, (5, 64, 128), mesh(fsdp=8), (None, None, None)),
        (MLP, (5, 64, 128), mesh(tensor=4), (None, None, "tensor")),
        (MLP, (5, 64, 128), mesh(2, 2), (None, "fsdp", "tensor")),
        # What "tensor" has taken is not left for "fsdp".
        (MLP, (5, 64, 128), mesh(4, 2), (None, None, "tensor")),
        # Divided, but inside tiles: a grid of 1 x 1.
        (MLP, (5, 8, 12), mesh(2, 2), (None, None, None)),
        # Large, so cut regardless: a grid of 32 x 16.
        (MLP, (5, 2112, 2112), mesh(fsdp=64), (None, "fsdp", None)),
        (("layers", "embed"), (4, 1 << 21), mesh(2), (None, None)),
        (("vocab", "embed"), (128, 64), mesh(2, 2), ("tensor", "fsdp")),
        (QUERY, (2, 128, 4, 32), mesh(4, 2), (None, "fsdp", "tensor", None)),
    ],
)
def test_parameters_are_cut_on_tiles_or_not_at_all(names, shape, sizes, spec):
    assert tuple(param_spec(sizes, names, shape)) == spec


def test_what_is_cut_inside_tiles_keeps_them_whole():
    grid = TileGrid.of((2112, 2112)).grid
    spec = param_spec(mesh(64, 4), MLP, (5, 2112, 2112))
    assert tuple(spec) == (None, "fsdp", "tensor")
    assert tuple(tile_spec(tuple(spec)[1:], mesh(64, 4), grid)) == (None, "tensor")


def test_what_a_mesh_axis_does_not_divide_is_whole_in_use():
    four = layout(AbstractMesh((1, 1, 1, 4), MESH_AXES))
    names = ("embed", "vocab")
    assert tuple(four.spec(names, (8, 8))) == (None, "tensor")
    assert tuple(four.spec(names, (8, 6))) == (None, None)


def test_the_expert_axis_cuts_the_experts_alone():
    sizes = mesh(4, 1, 8)
    model = transformer.build(preset("qwen3_30b_a3b"))
    for path, names, leaf in flat(model.axes, model.shapes()):
        spec = tuple(param_spec(sizes, names, leaf.shape))
        at = names.index("expert") if "expert" in names else -1
        assert [i for i, cut in enumerate(spec) if cut == "expert"] == [at] * (at > 0)
        assert "fsdp" in spec or len(leaf.shape) < 3, path


@pytest.mark.parametrize("name", ["1b", "12b"])
def test_real_models_are_aligned_on_a_slice_of_64(name):
    model, sizes = transformer.build(preset(name)), mesh(8, 4)
    for path, names, leaf in flat(model.axes, model.shapes()):
        stacked = names[0] == "layers"
        spec = tuple(param_spec(sizes, names, leaf.shape))[stacked:]
        grid = TileGrid.of(leaf.shape[stacked:]).grid
        assert tuple(tile_spec(spec, sizes, grid)) == spec, path
        assert "fsdp" in spec or len(grid) < 2, path


def flat(axes, shapes, path=""):
    for key, value in axes.items():
        if isinstance(value, dict):
            yield from flat(value, shapes[key], f"{path}/{key}")
        else:
            yield f"{path}/{key}", value, shapes[key]
