"""A small model: shapes and logical axes of its parameters."""

SHAPES = {"embed": (16, 8), "blocks": {"w": (2, 8, 8), "scale": (2, 8)}}
AXES = {
    "embed": ("vocab", "embed"),
    "blocks": {"w": ("layers", "embed", "mlp"), "scale": ("layers", "embed")},
}
PIN_S = 60.0
WHOSE = {"run_id": "r", "run": {"total_tokens": 0}, "plan": ""}
"""Facts in the headers of an engine's snapshots."""


def arrays(store):
    """Arrays of all fragments, as snapshots take them."""
    return [store.arrays(f) for f in range(len(store.plan.fragments))]


def load(store, arrays, versions):
    for fragment, version in enumerate(versions):
        store.load(fragment, arrays[fragment], version)
