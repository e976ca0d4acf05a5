"""Text to train on. The checks of a run's tape are shared with the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small text files."""
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0)
    for index in range(20):
        line = " ".join(str(n) for n in words.integers(0, 99, 200))
        (folder / f"{index}.txt").write_text(line)
    return folder
