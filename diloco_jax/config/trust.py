"""Trust in the code that the config of a workdir names: opening a folder that somebody
else made executes nothing unless the user says so.

Whoever writes a config that names code seals it with a key of their own, which lies in
their home. A folder without that seal, or with another config, is foreign. The code
itself is not sealed: it may change, as it does while somebody works on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path

from diloco_jax.config.placement import Placement
from diloco_jax.config.run import RunConfig
from diloco_jax.errors import ConfigError
from diloco_jax.files import of_home, write_text

CODE = (
    "model.factory",
    "data.factory",
    "sync.weighting",
    "sync.merge",
    "sync.adopt",
    "sync.codec_up",
    "sync.codec_down",
    "outer.optimizer",
)
"""Fields that may name code outside of the package, as "path/to/file.py:name" or
"package.module:name"."""
ALERTS = "placement.alert_command"
"""Field that names a command."""
SEAL = ".seal"
"""Ending of the file beside a config."""
KEY_BYTES = 32


def named_code(run: RunConfig, placement: Placement | None = None) -> dict[str, str]:
    """Return the code outside of the package that a config names, by field. placement:
    of a run that may go on, whose command for alerts is executed then."""
    found = {}
    if placement is not None and placement.alert_command:
        found[ALERTS] = placement.alert_command
    for field in CODE:
        section, name = field.split(".")
        value = getattr(getattr(run, section), name)
        if value and ":" in value:
            found[field] = value
    return found


def seal(run: RunConfig, placement: Placement, path: Path) -> None:
    """Write the seal of a config at `path`, if the config names code.

    If the user has no home folder that can be written, there is no seal, and the run's
    folder counts as foreign.
    """
    if not named_code(run, placement):
        return
    with contextlib.suppress(OSError, ValueError):
        write_text(_digest(_key(make=True), run, placement), path.with_suffix(SEAL))


def require(
    run: RunConfig, placement: Placement, path: Path, *, trust_code: bool
) -> None:
    """Raise ConfigError if a config at `path` names code and is foreign.

    trust_code: execute the code all the same; the folder then gets the user's seal.
    """
    if trust_code or not named_code(run, placement):
        seal(run, placement, path)
        return
    with contextlib.suppress(OSError, ValueError):
        wanted = _digest(_key(make=False), run, placement)
        found = path.with_suffix(SEAL).read_bytes()
        if hmac.compare_digest(found, wanted.encode()):
            return
    require_flag(run, f"{path}", trust_code=False, placement=placement)


def require_flag(
    run: RunConfig,
    whose: str,
    *,
    trust_code: bool,
    placement: Placement | None = None,
) -> None:
    """Raise ConfigError if a foreign config names code, unless `trust_code` is True.

    whose: names the config in the message. placement: see `named_code`.
    """
    code = named_code(run, placement)
    if trust_code or not code:
        return
    named = ", ".join(f"{field} = {value!r}" for field, value in code.items())
    raise ConfigError(
        f"{whose} names code ({named}), and was not written by this user on this "
        f"machine: opening it executes that code; read it, then give --trust-code"
    )


def _digest(key: bytes, run: RunConfig, placement: Placement) -> str:
    code = named_code(run, placement)
    sealed = json.dumps([code, run.fingerprint()], sort_keys=True)
    return hmac.new(key, sealed.encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Return the user's key; make it if there is none. Raises OSError, or ValueError if
    it is damaged."""
    path = of_home("XDG_STATE_HOME", "~/.local/state") / "diloco" / "key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        whole = path.with_name(f".key-{secrets.token_hex(8)}")
        descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # Another process was faster.
                os.link(whole, path)
        finally:
            whole.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} has {len(key)} bytes, expected {KEY_BYTES}")
    return key
