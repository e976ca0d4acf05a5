"""A process whose start fails says why, and whether to start it again."""

from __future__ import annotations

import jax
import pytest
from runtime_support import coordinator, make_config

from diloco_jax.errors import EXIT_CONFIG, EXIT_FAILED
from diloco_jax.files import StorageAway
from diloco_jax.island import main
from diloco_jax.island.device.build import compile_programs

pytestmark = [pytest.mark.dist]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("UNAVAILABLE: no answer of the TPU driver", EXIT_FAILED),
        ("DEADLINE_EXCEEDED: no answer of the compiler", EXIT_FAILED),
        ("FAILED_PRECONDITION: Continuation fusion", EXIT_CONFIG),
    ],
)
def test_a_compilation_that_fails_gives_the_slice_back_only_for_good(
    text, tmp_path, monkeypatch, caplog, said, code
):
    class Program:
        def compile(self):
            raise jax.errors.JaxRuntimeError(said)

    def fails(host):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        compile_programs([Program()])

    monkeypatch.setattr(main.TrainingHost, "compile", fails)
    config = make_config(text)
    with coordinator(config, tmp_path / "run") as service:
        assert main.run(config, "a", service.address, tmp_path / "a", 1) == code
    assert said in caplog.text


def test_data_in_a_bucket_that_is_away_may_be_there_the_next_time(
    text, tmp_path, monkeypatch, caplog
):
    def away(run):
        raise StorageAway("gs://bucket/rows does not answer")

    monkeypatch.setattr(main, "load_data", away)
    assert main.run(make_config(text), "a", "127.0.0.1:1", tmp_path, 1) == EXIT_FAILED
    assert "cannot start: gs://bucket/rows does not answer" in caplog.text
