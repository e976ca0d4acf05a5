"""Runs that begin from files, and the folders of families they begin from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_jax import checkpoint
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main
from diloco_jax.coordinator.holding.fragment_snapshots import KeptCycles
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.fragments import FragmentPlan, get_piece
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.holding import KeepFragment
from diloco_jax.protocol.messages import Version
from diloco_jax.weights.first import first_pieces, started_from
from diloco_jax.workdir import read_config

FAMILIES = Path(__file__).parents[1] / "models" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.py")


def learning(source: Path, rows: Path, length: int, **model: Any) -> Config:
    """A short run from a folder, on rows of its tokens, of two unlike islands."""
    run = RunConfig(
        model=ModelConfig(**model),
        data=DataConfig(paths=(str(rows),)),
        inner=InnerConfig(optimizer="sgd", learning_rate=0.3),
        sync=SyncConfig(fragments=3, steps_per_cycle=4),
        sequence_length=length,
        total_tokens=2_000,
    )
    islands = {
        "fast": IslandConfig(batch_size=4, step_seconds=0.1),
        "slow": IslandConfig(batch_size=2, step_seconds=0.2),
    }
    return started_from(Config(run=run, islands=islands), f"hf:{source}")


def begun(config: Config, source: str, workdir: Path) -> Path:
    """The workdir of a run that has begun, and merged nothing."""
    if source:
        config = started_from(config, source)
    coordinator = main.Coordinator(resolve(config.validate()), workdir, init=True)
    try:
        coordinator.start()
    finally:
        coordinator.close()
    return workdir


def with_learnt(workdir: Path, params: Any, monkeypatch: Any) -> RunConfig:
    """The run of a workdir, of which an export then finds these parameters."""
    run = read_config(workdir).run
    pieces = [(p, get_piece(params, p)) for p in build_plan(run, build(run)).pieces]
    newest = "diloco_jax.weights.export.newest_pieces"
    monkeypatch.setattr(newest, lambda *given: iter(pieces))
    return run


def keep_cycle(
    workdir: Path, cycle: int, change: Callable[[Any], Any] = lambda array: array
) -> FragmentPlan:
    """Keep a cycle of a run that has begun, of 2 merges and 96 tokens, with each array
    of its parameters changed."""
    run = read_config(workdir).run
    plan = build_plan(run, build(run))
    store = Store(run, plan, first_pieces(run, build(run)), 0.0)
    cycles = KeptCycles(workdir, 2, checkpoint.whose(run, "r", plan), plan.sizes)
    for fragment in range(len(plan.fragments)):
        keep = KeepFragment(
            cycle=cycle, fragment=fragment, version=Version(1, 2), merges=2, tokens=96
        )
        theta = [change(array) for array in store.arrays(fragment)["theta"]]
        cycles.keep(keep, lambda theta=theta: theta, lambda cycle, trouble: None)
    cycles.close(60.0)
    return plan
