"""Runs that begin from files, and the folders of families they begin from."""

from pathlib import Path

from diloco_jax.config import Config
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main
from diloco_jax.weights.first import started_from

FAMILIES = Path(__file__).parents[1] / "models" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())
QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.py")


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
