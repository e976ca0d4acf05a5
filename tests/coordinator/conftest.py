"""A small model's fragments, and the coordinator's parts around them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from coordinator_support import AXES, PIN_S, SHAPES

from diloco_jax.config import OuterConfig, RunConfig, SyncConfig
from diloco_jax.coordinator.store import Store
from diloco_jax.core.fragments import plan_fragments


@pytest.fixture
def run() -> RunConfig:
    return RunConfig(
        outer=OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
        sync=SyncConfig(fragments=2, codec_up="int8", codec_down="int8"),
    )


@pytest.fixture
def params() -> dict:
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: random.normal(size=shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.fixture
def store(run, params) -> Store:
    return Store(run, plan_fragments(SHAPES, AXES, 2), params, PIN_S)
