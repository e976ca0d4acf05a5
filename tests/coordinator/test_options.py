"""`--init` with a source and without one."""

import pytest

from diloco_jax.coordinator.options import DRAWN, with_source


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], []),
        (["--init"], ["--init", DRAWN]),
        (["--init", "--workdir", "w"], ["--init", DRAWN, "--workdir", "w"]),
        (["--init", "hf:d", "--workdir", "w"], ["--init", "hf:d", "--workdir", "w"]),
        (["--init=run:w"], ["--init=run:w"]),
    ],
)
def test_an_init_without_a_source_draws(given, meant):
    assert with_source(given) == meant
