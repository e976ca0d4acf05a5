"""A coordinator with a config of more tokens than its run has; and the options that say
how it begins.
"""

import dataclasses

import pytest

from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError, OuterConfig, RunConfig
from diloco_jax.config.loading import read_config_json
from diloco_jax.config.resolving import resolve_open
from diloco_jax.coordinator.going_on import (
    DRAWN,
    CoordinatorOptions,
    extension,
    with_beginning_of,
    with_source,
)
from diloco_jax.protocol.coordinator.state import RunExtended, State

OUTER = OuterConfig(optimizer="sgd", learning_rate=0.7, momentum=0.0)
OVER = State(phase="done", progress_tokens=1010)


def of_tokens(total_tokens: int) -> Config:
    return Config(run=RunConfig(total_tokens=total_tokens, outer=OUTER))


@pytest.fixture
def workdir(tmp_path):
    workdirs.begin_run(of_tokens(1000), tmp_path)
    return tmp_path


def test_a_run_that_is_over_goes_on_and_its_config_says_so(workdir):
    assert extension(of_tokens(2000), workdir, OVER) == RunExtended()
    assert read_config_json(workdir / "config.json") == of_tokens(2000)
    # As after a crash between the file and the record.
    assert extension(of_tokens(2000), workdir, OVER) == RunExtended()


def test_more_tokens_choose_no_other_cycle(tmp_path):
    """What was chosen as the run began stays, whatever its config would choose now."""
    begun = resolve_open(of_tokens(2_500_000))
    workdirs.begin_run(begun, tmp_path)
    more = resolve_open(with_beginning_of(of_tokens(5_000_000), tmp_path))
    assert more.run.sync == begun.run.sync
    assert resolve_open(of_tokens(5_000_000)).run.sync != begun.run.sync


def test_other_runs_are_not_extended(workdir):
    before = (workdir / "config.json").read_bytes()
    assert extension(of_tokens(1000), workdir, OVER) is None
    assert extension(of_tokens(1000), workdir, State(progress_tokens=10)) is None
    with pytest.raises(ConfigError, match=r"1010, but .* trained on 1010 tokens"):
        extension(of_tokens(1010), workdir, OVER)
    for phase in ("running", "flushing"):
        with pytest.raises(ConfigError, match="is on its way to 1000: let it end"):
            extension(of_tokens(2000), workdir, State(phase=phase))
    assert (workdir / "config.json").read_bytes() == before


def test_only_who_resumes_may_have_more_tokens(workdir):
    facts = workdirs.read_facts(workdir)
    assert workdirs.find_run(of_tokens(2000), workdir, extends=True) == facts
    with pytest.raises(ConfigError, match="total_tokens: 1000 here, 2000 there"):
        workdirs.find_run(of_tokens(2000), workdir)
    with pytest.raises(ConfigError, match="total_tokens: 1000 here, 999 there"):
        workdirs.find_run(of_tokens(999), workdir, extends=True)
    other = dataclasses.replace(of_tokens(2000).run, seed=3)
    with pytest.raises(ConfigError, match="seed: 0 here, 3 there"):
        workdirs.find_run(Config(run=other), workdir, extends=True)


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
