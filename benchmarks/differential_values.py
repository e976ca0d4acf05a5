"""Values of the product as JSON and back, for any layout of its modules."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from differential_names import FIELDS, NAMES, NEW_RESULTS, REWRITES, Call, Rewrite

PACKAGE = "diloco_jax."
ADOPT_RULE = "protocol.island.adopt_traits.AdoptTraits"
FACTS = ("adopts_first", "keeps_pending", "loses_steps")
Encode = Callable[[Any], Any]


class Foreign:
    """A recorded object whose class this checkout does not have."""

    def __init__(self, tag: str, fields: Mapping[str, Any]) -> None:
        self.tag, self.fields = tag, fields


def text(value: Any) -> str:
    """JSON, byte for byte the same for the same value."""
    return json.dumps(value, separators=(",", ":"))


def code_digest() -> str:
    """Return the digest of the imported package's code."""
    package = Path(importlib.import_module(PACKAGE[:-1]).__file__ or "").parent
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return code.hexdigest()


def encode(value: Any, special: Mapping[type, Encode]) -> Any:
    """A value as JSON. special: encoders of some classes."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in special:
        return special[kind](value)
    inner = functools.partial(encode, special=special)
    if (names := _fields(kind)) is not None:
        fields = {name: inner(getattr(value, name)) for name in names}
        return {"": tag_of(kind), **fields}
    if kind in (tuple, list):
        return [inner(item) for item in value]
    if kind is dict and all(isinstance(key, str) for key in value):
        return {key: inner(item) for key, item in value.items()}
    if kind is dict:
        return {"": "dict", "items": [[inner(k), inner(v)] for k, v in value.items()]}
    if kind in (set, frozenset):
        return {"": "set", "items": [inner(item) for item in sorted(value)]}
    if kind is bytes:
        return {"": "bytes", "hex": value.hex()}
    if hasattr(kind, "adopts_first"):
        # An adopt rule: mathematics, of which decisions see only these facts.
        return {"": ADOPT_RULE, **{name: getattr(value, name) for name in FACTS}}
    if kind is Foreign:
        return {"": value.tag, **{k: inner(v) for k, v in value.fields.items()}}
    return {"": tag_of(kind), "repr": repr(value)}


def decode(value: Any, special: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Undo `encode`; lists become tuples. special: decoders by tag."""
    inner = functools.partial(decode, special=special)
    if isinstance(value, list):
        return tuple(inner(item) for item in value)
    if not isinstance(value, dict):
        return value
    tag = value.get("")
    if tag is None:
        return {key: inner(item) for key, item in value.items()}
    if tag in special:
        return special[tag](value)
    if tag == "dict":
        return {inner(k): inner(v) for k, v in value["items"]}
    if tag == "set":
        return frozenset(inner(item) for item in value["items"])
    if tag == "bytes":
        return bytes.fromhex(value["hex"])
    fields = {key: inner(item) for key, item in value.items() if key}
    made = find(tag)
    if made is None or list(fields) == ["repr"]:
        return Foreign(tag, fields)
    return made(**fields)


def renamed(value: Any, call: Call) -> Any:
    """A recorded value in the words of this checkout."""
    return _rewritten(value, FIELDS, new_name, REWRITES, call)


def met(value: Any, call: Call) -> Any:
    """Return the part of this checkout's value that must equal the recorded one."""
    return _rewritten(value, {}, str, NEW_RESULTS, call)


def _rewritten(
    value: Any,
    fields: Mapping[str, Mapping[str, str | None]],
    name: Callable[[str], str],
    rewrites: Mapping[str, Rewrite],
    call: Call,
) -> Any:
    def inner(value: Any) -> Any:
        if isinstance(value, list):
            items: list[Any] = []
            for item in value:
                new = inner(item)
                # One effect may have become several.
                several = isinstance(item, dict) and isinstance(new, list)
                items += new if several else [new]
            return items
        if not isinstance(value, dict):
            return value
        old = value.get("")
        names = fields.get(old, {}) if old else {}
        new = {
            new_key: inner(item)
            for key, item in value.items()
            if (new_key := names.get(key, key)) is not None
        }
        if not old:
            return new
        tag = new[""] = name(old)
        return rewrites[tag](new, call) if tag in rewrites else new

    return inner(value)


@functools.cache
def new_name(old: str) -> str:
    """The name of a module or class by now."""
    parts = old.split(".")
    for length in range(len(parts), 0, -1):
        if (head := ".".join(parts[:length])) in NAMES:
            return ".".join([NAMES[head], *parts[length:]])
    return old


@functools.cache
def tag_of(kind: type) -> str:
    """Module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix(PACKAGE)


@functools.cache
def find(name: str) -> Any:
    """Return the object at this place of the package, or None."""
    module, _, attribute = name.rpartition(".")
    package = Path(importlib.import_module(PACKAGE[:-1]).__file__ or "").parent
    place = package.joinpath(*module.split("."))
    # Trying an import would also find modules of an installed checkout.
    if not (place.with_suffix(".py").exists() or (place / "__init__.py").exists()):
        return None
    return getattr(importlib.import_module(PACKAGE + module), attribute, None)


def found(places: tuple[str, ...]) -> Any:
    """Return the object at the first of these places that has one, or None."""
    return next((thing for place in places if (thing := find(place))), None)


@functools.cache
def _fields(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return getattr(kind, "_fields", None)
