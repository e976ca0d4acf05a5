"""Plans whose islands' steps are known, and terms of the configs that are planned."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from config_support import load_config

from diloco_jax.config import Config, IslandConfig, RunConfig, SyncConfig
from diloco_jax.hardware.machines import Measurements
from diloco_jax.hardware.tpus import find_slice
from diloco_jax.models.flops import Flops
from diloco_jax.models.presets import preset
from diloco_jax.planning.compiling import ExchangePlan, Hbm, IslandPlan, roofline
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import Plan, fragments_of, plan_run
from diloco_jax.planning.program import CollectiveSum
from diloco_jax.planning.terms import Terms, terms_of

ROOT = Path(__file__).parents[2]
GB = 10**9
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: pip install -e '.[tpu]'",
)

CONFIG = Config(
    run=RunConfig(
        model=preset("tiny"),
        sync=SyncConfig(steps_per_cycle=20, fragments=5, overlap_steps=2),
    ),
    islands={
        "big": IslandConfig(topology="v6e:4x4", batch_size=64, mesh_fsdp=16),
        "small": IslandConfig(topology="v5p:2x2x1", batch_size=16, mesh_fsdp=4),
    },
)

HBM = Hbm(
    parameters=2 * GB,
    optimizer=4 * GB,
    watched=0,
    anchors=2 * GB,
    residuals=2 * GB,
    open_takes=1 * GB,
    late_takes=3 * GB,
    temporaries=9 * GB,
    used=20 * GB,
    available=30 * GB,
    missing=0,
    pinned_host=0,
)


FLOPS = {"big": 16 * 918e12, "small": 4 * 459e12}
"""One second of each island's chips."""


@functools.cache
def shipped(name: str, link: float = 5.0) -> Terms:
    """A config of the package, with steps of about a second."""
    config = load_config(ROOT / "configs" / f"{name}.py")
    steps = dict.fromkeys(config.islands, 0.95)
    return terms_of(config, fragments_of(config), steps, link)


def planned(
    config: Config = CONFIG,
    measured: Any = None,
    compiled: dict[str, IslandPlan] | None = None,
    **world: Any,
) -> Plan:
    """A plan of `CONFIG`, or of one that is like it, in a world without interruptions
    and with fast links."""
    made = compiled or {
        name: island(config.islands[name].topology, flops=flops)
        for name, flops in FLOPS.items()
    }
    assumed = Assumptions(**{"mtbi_years": 0.0, "link_gbit_per_s": 1000.0} | world)
    found = msgspec.convert(measured or {}, Measurements)
    return plan_run("x.py", config, fragments_of(config), assumed, made, measured=found)


def island(
    topology: str,
    *,
    flops: float,
    hbm_bytes: int = 0,
    collectives: tuple[CollectiveSum, ...] = (),
    hbm: Hbm = HBM,
    **changes: Any,
) -> IslandPlan:
    """An island whose step has that many operations."""
    found = find_slice(topology, "topology")
    fits = not hbm.missing
    plan = IslandPlan(
        topology=topology,
        fits=fits,
        refusal="" if fits else "out of memory",
        hbm=hbm,
        flops=Flops(model=flops, analytic=flops, executed=flops),
        hbm_traffic_bytes=hbm_bytes if fits else None,
        collectives=list(collectives) if fits else None,
        exchange=[
            ExchangePlan(
                piece="embedding", pieces=1, aligned=True, collectives={}, seconds=0.0
            )
        ],
        roofline=roofline(
            found,
            model_flops=flops,
            executed_flops=flops,
            hbm_bytes=hbm_bytes,
            collectives=list(collectives),
        ),
    )
    return dataclasses.replace(plan, **changes)


# ---- islands that are compiled ------------------------------------------------------


def run_plan(
    config: Any, *options: str, timeout_s: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco_jax.cli", "plan", str(config), "--json"]
    return subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def plan(config: Any, *options: str, timeout_s: float = 280) -> tuple[int, Any]:
    done = run_plan(config, *options, timeout_s=timeout_s)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)
