"""`--init` with a source and without one, and options that exclude each other."""

import pytest

from diloco_jax.coordinator.going_on import DRAWN, CoordinatorOptions, with_source
from diloco_jax.errors import ConfigError


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init": DRAWN}, "--init begins a run"),
        ({"resume": True}, "--resume goes on from the workdir"),
    ],
)
def test_a_run_is_named_only_where_nothing_else_names_it(options, said):
    with pytest.raises(ConfigError, match=said):
        CoordinatorOptions(run_id="r", **options).check_run()
    CoordinatorOptions(run_id="r").check_run()
    CoordinatorOptions(**options).check_run()
