"""The tape says what a replay must find again."""

import jax

from diloco_jax import environment


def test_threads_are_those_of_xlas_pool(monkeypatch):
    monkeypatch.setenv("NPROC", "5")
    assert environment.describe()["threads"] == 5
    monkeypatch.delenv("NPROC")
    assert environment.describe()["threads"] >= 1


def test_facts_are_those_of_this_process(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_two=2")
    monkeypatch.setattr(environment.libtpu, "installed_version", lambda: "0.0.50.1")
    facts = environment.describe()
    assert facts["jax"] == jax.__version__
    assert facts["devices"] == jax.device_count()
    assert facts["xla_flags"] == "--xla_one=1"
    assert (facts["libtpu"], facts["libtpu_flags"]) == ("0.0.50.1", "--xla_tpu_two=2")
    assert facts["cpu"]


def test_variables_that_steer_jax_are_on_the_tape(monkeypatch):
    given = {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "TPU_VISIBLE_DEVICES": "0,1",
        # A host's place, a fact of its own, and none of jax's.
        "TPU_WORKER_HOSTNAMES": "a,b",
        "XLA_FLAGS": "--xla_one=1",
        "HF_TOKEN": "a secret",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = str(environment.describe()["variables"])
    assert "JAX_DEFAULT_MATMUL_PRECISION=highest" in told.split()
    assert "TPU_VISIBLE_DEVICES=0,1" in told.split()
    assert not any(text in told for text in ("a,b", "xla_one", "secret"))
    monkeypatch.setenv("TPU_LONG", "x" * 20_000)
    assert len(str(environment.describe()["variables"])) == environment.LONGEST
