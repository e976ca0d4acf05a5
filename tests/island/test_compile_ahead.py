"""A failed compilation ends an island for good, and names the flags in force."""

from types import SimpleNamespace

import jax
import pytest

from diloco_jax import before_jax
from diloco_jax.config import Config, ConfigError
from diloco_jax.island import host
from diloco_jax.island.device.build import NotCompiledError, compile_ahead


class Refused:
    """Programs that the compiler does not take."""

    def __init__(self, said="FAILED_PRECONDITION: Continuation fusion"):
        self.said = said

    def lower_all(self, *args):
        return [self]

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.said)


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("UNAVAILABLE: TPU initialization failed", True),
        ("DEADLINE_EXCEEDED: no answer", True),
        ("ABORTED: a peer has left", True),
        ("CANCELLED: a peer has left", True),
        ("RESOURCE_EXHAUSTED: out of HBM", False),
        ("INVALID_ARGUMENT: as it is UNAVAILABLE here", False),
        ("INTERNAL: Mosaic failed", False),
    ],
)
def test_what_may_pass_is_no_fault_of_the_config(said, passes):
    with pytest.raises(NotCompiledError if passes else ConfigError, match=said):
        compile_ahead(Refused(said), Refused(said), {}, 8)


def test_a_refusal_names_the_flags_in_force(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_mine=1")
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "0.0.50.1")
    with pytest.raises(ConfigError, match="Continuation fusion") as refused:
        compile_ahead(Refused(), Refused(), {}, 8)
    assert "libtpu 0.0.50.1, LIBTPU_INIT_ARGS = '--xla_mine=1'" in str(refused.value)


@pytest.mark.parametrize(
    ("platform", "hosts", "ahead"),
    [("tpu", None, True), ("cpu", None, False), ("cpu", "several", True)],
)
def test_tpus_and_several_hosts_run_nothing_before_all_is_compiled(
    monkeypatch, platform, hosts, ahead
):
    class RunsError(Exception):
        pass

    def warm(zeros, *, seldom):
        assert seldom == ahead
        raise RunsError

    here = SimpleNamespace(
        _hosts=hosts,
        _trainer=Refused(),
        _exchange=SimpleNamespace(lower_all=lambda params: [], warm=warm),
        _zeros={},
        _watched=None,
        config=Config(),
    )
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with pytest.raises(ConfigError if ahead else RunsError):
        host.Host.compile(here)
