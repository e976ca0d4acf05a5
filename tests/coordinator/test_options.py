"""`--init` with a source and without one, and options that exclude each other."""

import re

import pytest

from diloco_jax.config import Placement
from diloco_jax.coordinator.options import DRAWN, CoordinatorOptions, with_source
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
        ({"init": DRAWN}, "--init drawn begins or resumes"),
        ({"resume": True}, "--resume begins or resumes"),
        ({}, "--standby-of: address 'h'"),
    ],
)
def test_a_standby_begins_nothing(options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        CoordinatorOptions(standby_of="h", **options).check_standby()


@pytest.mark.parametrize(
    ("options", "placement", "said"),
    [
        ({"init": DRAWN}, {}, "--init begins a run"),
        ({"resume": True}, {}, "--resume goes on from the workdir"),
        ({"standby_of": "h:1"}, {}, "a standby has its run"),
        ({}, {"mandate": "m"}, "placement.mandate says which run"),
    ],
)
def test_a_run_is_named_only_where_nothing_else_names_it(options, placement, said):
    given = CoordinatorOptions(run_id="r", **options)
    with pytest.raises(ConfigError, match=said):
        given.check_run(Placement(**placement))
    CoordinatorOptions(run_id="r").check_run(Placement())
    CoordinatorOptions(**options).check_run(Placement(**placement))
