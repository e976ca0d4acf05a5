"""`diloco dashboard WORKDIR [--port N]`."""

from __future__ import annotations

import dataclasses
import logging
import socket
import sys
import threading
from pathlib import Path

from diloco_jax.config import ConfigError, Placement
from diloco_jax.config.fields import NOT_NEGATIVE, positional, setting
from diloco_jax.config.options import command
from diloco_jax.files import expand

LOOPBACK = "127.0.0.1"
PORT = 7080
BACKLOG = 64
STOP_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    """The options of `diloco dashboard`."""

    workdir: Path = positional(
        metavar="WORKDIR", help="The workdir of a run that goes on or is over."
    )
    port: int = setting(PORT, help="Port of this machine's loopback; 0 = any.")
    link_gbit_per_s: float = setting(
        0.0,
        NOT_NEGATIVE,
        help="Gbit/s of each island's link, each way, of which the share that is used "
        "is shown; 0 = not known.",
    )
    certificates: str = setting(
        "",
        help="Folder made by diloco certs, with a reader's files; empty = that of the "
        "run's config.",
    )


@command(DashboardOptions, "diloco dashboard")
def dashboard_command(options: DashboardOptions) -> int:
    """Show a run in a browser, on this machine alone. It reads and changes nothing."""
    import uvicorn

    from diloco_jax.dashboard.app import RunReader, make_app

    placement = Placement(certificates=options.certificates)
    run = RunReader(
        expand(options.workdir), placement, options.link_gbit_per_s * 1e9 / 8
    )
    listener = listen(options.port)
    port = listener.getsockname()[1]
    print(f"http://localhost:{port} shows {options.workdir}", file=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with listener, run as reader:
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(reader),
                access_log=False,
                lifespan="off",
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
        # Not in the main thread, whose signals are the command's.
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            thread.join()
        except KeyboardInterrupt:
            pass
        finally:
            server.should_exit = True
            thread.join(2 * STOP_S)
    return 0


def listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback; ConfigError if it cannot."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port is {port}; give one from 0 (any) to 65535")
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: {error.strerror or error} on {LOOPBACK}; give another "
            f"one, or 0 for any"
        ) from error
    return listener
