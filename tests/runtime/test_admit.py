"""`diloco admit` and `diloco release` of a coordinator's process that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import support
from runtime_support import PATIENCE_S, client, hello, make_config, placed

from diloco_jax import cli, run_files
from diloco_jax.config import Config
from diloco_jax.config.loading import write_config_json
from diloco_jax.protocol import messages
from diloco_jax.wire import peers
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.tls import TlsFiles

pytestmark = pytest.mark.dist


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """A coordinator's process, at this address, until SIGKILL."""
    command = ["coordinator", folder / "config.json", "--workdir", folder / "run"]
    command += ["--bind", "127.0.0.1:0", *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*support.DILOCO, *map(str, command)], stderr=log, env=environment
        )
    try:
        file, deadline = folder / "run" / run_files.ADDRESS, time.monotonic() + 60
        while not file.exists():
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield file.read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
        file.unlink(missing_ok=True)


def comes(address: str, folder: Path, config: Config, incarnation: int) -> str:
    """Say hello as island c; return the code of the refusal, or "welcome"."""
    tls = TlsFiles.load(folder / "certificates", peers.island("c"))
    stranger = msgspec.structs.replace(
        hello(config), island="c", session=f"c{incarnation}", incarnation=incarnation
    )
    with client(address, tls=tls) as island:
        try:
            stream = island.open_control(stranger)
        except Refused as refused:
            return refused.code
        assert isinstance(stream.welcome, messages.Welcome)
        return "welcome"


def test_an_operator_admits_and_removes_an_island_of_a_run_that_goes_on(
    text, tmp_path, capsys
):
    certificates = tmp_path / "certificates"
    make_certificates(certificates, [], 1, islands=["a", "b", "c"])
    config = placed(
        make_config(text), certificates=str(certificates), time_budget_s=PATIENCE_S
    )
    write_config_json(config, tmp_path / "config.json")

    def call(command: str, *options: str) -> int:
        where = ("--coordinator", str(tmp_path / "run"))
        return cli.main([command, "c", *where, *options])

    with served(tmp_path, "--init") as address:
        assert comes(address, tmp_path, config, 1) == "unknown_island"
        assert call("admit", "--certificates", str(tmp_path / "none")) == 2
        assert call("admit") == 0
        assert "besides those of the config: c" in capsys.readouterr().err
        assert comes(address, tmp_path, config, 1) == "welcome"
        assert call("release") == 0
        assert cli.main(["release", "x", "--coordinator", str(tmp_path / "run")]) == 3
    with served(tmp_path) as address:
        assert comes(address, tmp_path, config, 2) == "welcome"
        assert call("admit", "--remove") == 0
        assert comes(address, tmp_path, config, 3) == "unknown_island"
    with pytest.raises(SystemExit):
        call("admit", "--nonsense")
    assert call("admit") == 1, "no coordinator is up"
