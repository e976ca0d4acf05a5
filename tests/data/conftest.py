"""Tokenizers and texts that several tests of data need."""

from pathlib import Path

import make_tokenizers
import pytest

from diloco_jax.data import manifest


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of tiny tokenizers by kind; "bytes" has none."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = {name: make(root / name) for name, make in make_tokenizers.KINDS.items()}
    return {"bytes": Path(""), **made}


@pytest.fixture
def texts(tmp_path):
    """Files of text of many lengths, by name."""
    (tmp_path / "in").mkdir()
    sizes = [1, 2, 31, 32, 33, 64, 65, 66, 500, *range(3, 60)]
    found = {
        f"t{number:03}.txt": "".join(chr(65 + (number + i) % 58) for i in range(size))
        for number, size in enumerate(sizes)
    }
    for name, text in found.items():
        (tmp_path / "in" / name).write_text(text)
    return found


@pytest.fixture
def reads(monkeypatch):
    """Sizes of the chunks that are read for a manifest."""
    sizes, digest = [], manifest._digest
    monkeypatch.setattr(
        manifest, "_digest", lambda chunk: sizes.append(len(chunk)) or digest(chunk)
    )
    return sizes
