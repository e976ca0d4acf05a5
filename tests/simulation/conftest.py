"""A text that emulated islands train on."""

from __future__ import annotations

import pytest
from digests import write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))
