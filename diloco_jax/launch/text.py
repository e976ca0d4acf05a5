"""Plain values as YAML that people can read."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Dumper that writes scripts and files as blocks of lines, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(*objects: dict[str, Any]) -> str:
    """Return the documents of one file."""
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
    return text
