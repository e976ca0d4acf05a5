"""A text that emulated islands train on."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    words = np.random.default_rng(0)
    for index in range(20):
        line = " ".join(str(n) for n in words.integers(0, 99, 200))
        (folder / f"{index}.txt").write_text(line)
    return str(folder)
