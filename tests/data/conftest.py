"""Tokenizers that several tests of data need, trained once."""

from pathlib import Path

import make_tokenizers
import pytest


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of tiny tokenizers by kind; "bytes" has none."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {name: make(root / name) for name, make in make_tokenizers.KINDS.items()}
    return {"bytes": Path(""), **made}
