"""Environment variables reach the processes, and those that must not are refused."""

import re
from importlib import resources

import pytest
from gke_support import changed

from diloco_jax import before_jax
from diloco_jax.config import ConfigError
from diloco_jax.config.placement import variables_of
from diloco_jax.launch.spec import OF_THE_LAUNCH, make_spec
from diloco_jax.planning.compiling import environment_of, flags_of

OFF = "--xla_tpu_use_tc_device_shape_on_sc=false"
GIVEN = {
    "HF_HOME": "/var/lib/diloco/run/hf cache",
    "LIBTPU_INIT_ARGS": "--xla_one=1",
    "v6e.b:LIBTPU_INIT_ARGS": f"{OFF} --xla_two=2",
    "coordinator:NPROC": "8",
}
SECRETS = {"HF_TOKEN": "hub-token", "v5p:WANDB_API_KEY": "wandb"}


@pytest.fixture
def given(config):
    return changed(config, environment=GIVEN, secrets=SECRETS)


def test_a_part_has_everybodys_variables_and_its_own(given):
    plain, secret = variables_of(given.launch, "v6e.b")
    assert plain == {
        "HF_HOME": "/var/lib/diloco/run/hf cache",
        "LIBTPU_INIT_ARGS": f"{OFF} --xla_two=2",
    }
    assert secret == {"HF_TOKEN": "hub-token"}
    plain, secret = variables_of(given.launch, "v5p")
    assert plain["LIBTPU_INIT_ARGS"] == "--xla_one=1"
    assert secret == {"HF_TOKEN": "hub-token", "WANDB_API_KEY": "wandb"}
    assert variables_of(given.launch, "coordinator").plain["NPROC"] == "8"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"environment": {"v7:A": "1"}}, "names 'v7', but the parts of the run are"),
        ({"environment": {"1A": "1"}}, "'1A', which names no variable"),
        ({"environment": {"JAX_PLATFORMS": "cpu"}}, "JAX_PLATFORMS, which `diloco la"),
        ({"environment": {"MEGASCALE_NUM_SLICES": "2"}}, "an island is one slice"),
        ({"environment": {"TPU_WORKER_ID": "0"}}, "another one on every host"),
        ({"environment": {"HF_TOKEN": "hf_123"}}, "looks like a credential, .*secrets"),
        ({"environment": {"v5p:A_KEY": "x"}}, "environment v5p:A_KEY looks like a"),
        ({"environment": {"A": "1\n2"}}, "more than one line"),
        ({"secrets": {"HF_TOKEN": "hf value"}}, "HF_TOKEN: its value cannot be"),
        ({"secrets": {"ROOT": "name"}}, "ROOT, which `diloco launch` sets itself"),
        (
            {"environment": {"A": "1"}, "secrets": {"v5p:A": "name"}},
            "both have A for v5p",
        ),
    ],
)
def test_what_must_not_be_given_is_refused(config, settings, said):
    with pytest.raises(ConfigError, match=said) as error:
        make_spec(changed(config, **settings), "two.py", "tpu_vm")
    assert "hf_123" not in str(error.value)
    assert "hf value" not in str(error.value)


def test_no_secret_can_overwrite_a_setting_of_the_script():
    script = resources.files("diloco_jax.launch").joinpath("host.sh").read_text()
    names = set(re.findall(r"\$\{?#?([A-Z][A-Z_]+)|\b([A-Z][A-Z_]+)=", script))
    found = {one or other for one, other in names}
    assert found - {"ERR", "BASH"} <= OF_THE_LAUNCH


def test_a_flag_against_the_table_is_named_with_both_values():
    table = ("--a=true", "--b=1")
    assert before_jax.flag_clashes("--a=true --c=2", table, "v6e") == []
    (clash,) = before_jax.flag_clashes("--b=2 --c=2", table, "v6e, libtpu 0.0.42.1")
    assert clash.startswith(
        "LIBTPU_INIT_ARGS has --b=2, and the table for v6e, libtpu 0.0.42.1 has --b=1"
    )


def test_the_plan_compiles_with_the_launchs_flags(given, monkeypatch):
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "0.0.42.1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_of_this_machine=1")
    flags = flags_of(given, "v6e.b")
    assert flags != flags_of(given, "v5p")
    environment = environment_of(given.islands["v6e.b"], flags)
    told = environment["LIBTPU_INIT_ARGS"].split()
    assert told[:2] == [OFF, "--xla_two=2"]
    assert before_jax.SPARSE_CORE[0] in told
    assert OFF.replace("false", "true") not in told
