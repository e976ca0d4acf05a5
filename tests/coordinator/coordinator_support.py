"""A small model: shapes and logical axes of its parameters."""

SHAPES = {"embed": (16, 8), "blocks": {"w": (2, 8, 8), "scale": (2, 8)}}
AXES = {
    "embed": ("vocab", "embed"),
    "blocks": {"w": ("layers", "embed", "mlp"), "scale": ("layers", "embed")},
}
PIN_S = 60.0
