"""Formats that follow from definitions: the fields of a config, the lines of a tape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from goldens import as_text, require_golden

from diloco_jax.config import Config, IslandConfig
from diloco_jax.config.fields import bound_of, types_of
from diloco_jax.config.loading import read_config
from diloco_jax.coordinator import journal
from diloco_jax.protocol import records


def test_the_fields_of_a_config_are_what_they_were():
    config = Config(islands={"NAME": IslandConfig()})
    require_golden("config_fields.txt", "\n".join(fields(config)) + "\n")


def test_the_config_of_the_first_run_is_what_it_was():
    fields = dataclasses.asdict(read_config("configs/quickstart.py"))
    require_golden("config.json", as_text(fields))


def test_the_lines_of_a_tape_are_what_they_were():
    """`time` and `prev`, which every line has besides, are not of its kind."""
    lines = records.Durable | records.Noted | journal.Note
    _, structs = msgspec.json.schema_components([lines], ref_template="{name}")
    text = "\n".join(f"{name}\n{told(struct)}" for name, struct in structs.items())
    require_golden("records.txt", text)


def fields(value: Any, prefix: str = "") -> Iterator[str]:
    """Every field below, with its type, its default and what else holds of it."""
    for field in dataclasses.fields(value):
        own, path = getattr(value, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(own):
            yield from fields(own, f"{path}.")
            continue
        if isinstance(own, dict) and own:
            for name, of in own.items():
                yield from fields(of, f"{path}.{name}.")
            continue
        marks = [name for name in ("local", "code") if field.metadata.get(name)]
        bounds = [str(bound)] if (bound := bound_of(field)) else []
        kind = str(types_of(type(value))[field.name])
        if kind.startswith("<"):
            kind = field.type
        yield f"{path}: {kind} = {own!r}{''.join(f', {m}' for m in (*bounds, *marks))}"


def told(struct: dict[str, Any]) -> str:
    """A struct's fields with their schemas; `?` behind one that may be missing."""
    if "properties" not in struct:
        return f"    {json.dumps(plain(struct))}\n"
    required = struct.get("required", [])
    return "".join(
        f"    {name}{'?' * (name not in required)}: {json.dumps(plain(of))}\n"
        for name, of in struct["properties"].items()
    )


def plain(schema: Any) -> Any:
    """A schema without the texts for people."""
    match schema:
        case dict():
            left = ("title", "description")
            return {k: plain(v) for k, v in schema.items() if k not in left}
        case list():
            return [plain(item) for item in schema]
    return schema
