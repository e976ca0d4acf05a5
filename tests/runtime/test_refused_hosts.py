"""An island of several hosts that is not let in: all of them end alike."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hosts_support import HOST
from runtime_support import PATIENCE_S, make_config, placed

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import IslandConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.config.placement import Deadlines
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.server import Server

pytestmark = pytest.mark.dist

TIMEOUT_S = 120.0


@pytest.fixture
def refusing():
    """The address of a coordinator that lets nobody in."""

    def refuse(hello, session):
        raise Refused("config", "nobody is let in")

    handlers = SimpleNamespace(connect=refuse, disconnect=lambda session: None)
    server = Server(
        "127.0.0.1:0",
        handlers,
        tls=None,
        deadlines=Deadlines(PATIENCE_S),
        max_islands=2,
        max_hosts=2,
        bulk_channels=1,
    )
    yield server.start()
    server.stop(0.1)


def test_all_hosts_end_with_the_code_of_the_first(text, tmp_path, refusing):
    config = placed(make_config(text), time_budget_s=PATIENCE_S)
    pair = IslandConfig(batch_size=4, hosts=2, mesh_fsdp=2)
    islands = {"pair": pair, "b": IslandConfig()}
    config = type(config)(run=config.run, islands=islands, placement=config.placement)
    path = tmp_path / "config.json"
    write_config_json(config.validate(), path)
    world, children = f"127.0.0.1:{free_port()}", []
    for index in range(2):
        arguments = [path, "pair", refusing, tmp_path, world, index, "1"]
        child = subprocess.Popen(
            [sys.executable, str(HOST), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        children.append(child)
    outputs = [child.communicate(timeout=TIMEOUT_S)[0] for child in children]
    assert [child.returncode for child in children] == [3, 3], outputs
    assert all("ends: nobody is let in (config)" in output for output in outputs)
