"""Files beside a tokenizer's own, and what its library raises.

They name its start and end, and words that were added to those of its own file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend, parse_json

CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
NAMING = (CONFIG, "special_tokens_map.json")
BESIDE = (*NAMING, ADDED, "chat_template.jinja")
"""Files that say which tokens are special, and how a chat is written."""


@contextlib.contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Raise ConfigError, naming the file, for all that a tokenizer's library raises.

    what: says what the file is not fit for, as "be read as a tokenizer".
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # A panic of Rust is no Exception.
        raise ConfigError(
            f"{path} cannot {what} ({error}); {how_to_mend(path)}"
        ) from error


def read_beside(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file beside a tokenizer's, empty if there is none.

    Raises ConfigError, naming the file, if it is no JSON object."""
    beside = path.with_name(name)
    try:
        found = parse_json(beside.read_bytes()) if beside.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"it is of type {type(found).__name__}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{beside} cannot be read as a JSON object ({error}); copy it again, or "
            f"leave it out"
        ) from error
    return found


def named_token(
    path: Path, field: str, token_of: Callable[[str], int | None], default: int
) -> int:
    """Return the token that the files beside a tokenizer's name as its `bos_token` or
    `eos_token`; the default if they name none.

    Raises ConfigError, naming the file, if it is none of the tokenizer's words."""
    for name in NAMING:
        named = read_beside(path, name).get(field)
        if named is None:
            continue
        word: Any = named.get("content") if isinstance(named, dict) else named
        found: int | None = None
        with contextlib.suppress(TypeError, RuntimeError, UnicodeError):
            found = token_of(word)
        if found is None:
            raise ConfigError(
                f"{path.with_name(name)}: {field} = {named!r} is no token of {path}; "
                f"give the files of one tokenizer"
            )
        return found
    return default
