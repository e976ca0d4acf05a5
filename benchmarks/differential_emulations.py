"""Small emulations, one for every adopt rule and codec and for what may happen, as
digests of everything that came of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from differential_names import LOAD_CONFIG, OVERRIDES
from differential_values import found

CONFIG = Path("configs", "quickstart.py")
ISLANDS = ("v6e", "v5p-a", "v5p-b")
SMALL = {
    "run.model.d-model": 32,
    "run.model.num-layers": 2,
    "run.model.num-heads": 2,
    "run.model.num-kv-heads": 1,
    "run.model.head-dim": 16,
    "run.model.mlp-dim": 64,
    "run.sequence-length": 32,
    "run.total-tokens": 40_000,
    "placement.faults": "v5p-b@20:kill",
}
NETWORK = {"merge_seconds": 0.6, "step_spread": 0.1, "join_seconds": 1.0}
CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "quickstart": ({}, {}),
    "unequal islands": (
        {
            "islands.v6e.step-seconds": 0.1,
            "islands.v5p-b.step-seconds": 3.0,
            "run.sync.quorum": 1,
        },
        NETWORK,
    ),
    "failures": (
        {"run.sync.quorum": 1, "placement.faults": "v5p-a@12:kill v5p-b@20:pause4"},
        {**NETWORK, "failure_every_seconds": 15.0, "down_seconds": 3.0},
    ),
    "comes and goes": ({}, {**NETWORK, "joins": {"v5p-a": (4.0, 20.0)}}),
    "keep int8 int8": (
        {"run.sync.adopt": "keep", "run.sync.weighting": "tokens_times_rate"},
        NETWORK,
    ),
    "rebase f32 bf16": (
        {
            "run.sync.adopt": "rebase",
            "run.sync.codec-up": "f32",
            "run.sync.codec-down": "bf16",
            "run.sync.merge": "mean",
        },
        NETWORK,
    ),
    "overwrite int4 f32": (
        {
            "run.sync.adopt": "overwrite",
            "run.sync.codec-up": "int4",
            "run.sync.codec-down": "f32",
            "run.sync.fragment-by": "layer",
        },
        NETWORK,
    ),
    "blend bf16 int4": (
        {
            "run.sync.adopt": "blend",
            "run.sync.codec-up": "bf16",
            "run.sync.codec-down": "int4",
            "run.sync.weighting": "uniform",
            "run.outer.optimizer": "nesterov",
            "run.outer.learning-rate": 0.4,
            "run.outer.momentum": 0.6,
        },
        NETWORK,
    ),
}


def emulations(folder: Path, *, renamed: bool) -> dict[str, dict[str, str]]:
    """Digests by case and by what is compared, made by the package that is imported.

    folder: of its configs. renamed: as `OVERRIDES` says.
    """
    from diloco_jax import EmulationOptions, emulate

    digests = {}
    for case, (overrides, options) in CASES.items():
        arguments: list[str] = []
        for name, value in {**SMALL, **overrides}.items():
            name = OVERRIDES.get(name, name) if renamed else name
            arguments += [f"--{name}", *str(value).split()]
        config = found(LOAD_CONFIG)(folder / CONFIG, arguments)
        result = emulate(config, options=EmulationOptions(**options))
        digests[case] = {
            "parameters": _digest(
                [(path, array.tobytes()) for path, array in _leaves(result.params)]
            )
        }
        for table, columns in vars(result.history).items():
            if isinstance(columns, Mapping):
                for column, values in columns.items():
                    values = np.asarray(values).tolist()
                    digests[case][f"{table}.{column}"] = _digest(values)
        for path, value in _leaves(result.summary):
            digests[case][f"summary.{path}"] = json.dumps(value)
    return digests


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            yield from _leaves(tree[key], f"{path}/{key}" if path else str(key))
    else:
        yield path, tree


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
