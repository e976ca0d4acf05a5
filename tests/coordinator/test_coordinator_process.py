"""What a coordinator's process is, whatever machine it is on."""

import jax
import pytest

from diloco_jax.coordinator import main


@pytest.fixture
def any_platform():
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "")
    yield
    jax.config.update("jax_platforms", before)


def test_it_computes_on_the_cpu(any_platform, monkeypatch, tmp_path):
    platforms = []

    def coordinator(*args, **kwargs):
        platforms.append(jax.config.jax_platforms)
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "Coordinator", coordinator)
    with pytest.raises(KeyboardInterrupt):
        main.run(None, tmp_path, init=True)
    assert platforms == ["cpu"]
