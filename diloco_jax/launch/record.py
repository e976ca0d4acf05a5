"""The record of what a launch has made, in `launch.json` of its workdir."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_jax.config import ConfigError
from diloco_jax.files import write_json
from diloco_jax.launch.resources import Resource


class LaunchRecord:
    """The backend, and the resources made there, oldest first."""

    def __init__(self, path: Path, on: str) -> None:
        """Read the file, if there is one.

        Raises ConfigError if it is another kind of file, or another backend's.
        """
        self._path, self._on = path, on
        self._made: list[dict[str, Any]] = []
        if not path.exists():
            return
        try:
            fields = json.loads(path.read_bytes())
            other, self._made = fields["on"], list(fields["made"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not what `diloco launch` wrote ({error!r}); restore it, or "
                f"delete by hand what was made, and then the file"
            ) from error
        if self._made and other != on:
            raise ConfigError(
                f"{path} says that this run is launched on {other}, not on {on}; "
                f"delete that first (--on {other} --action delete --disk), or choose "
                f"another --workdir"
            )

    @property
    def made(self) -> tuple[dict[str, Any], ...]:
        """Fields `what`, `owner`, `runs`, `keeps`, `content`, `due`, `delete` and
        `deadline_s` of each resource."""
        return tuple(self._made)

    def content(self, what: str) -> str:
        """Return the content that a resource was last given; empty if unknown."""
        for entry in self._made:
            if entry["what"] == what:
                return str(entry.get("content", ""))
        return ""

    def is_due(self, what: str) -> bool:
        """Tell whether a resource was asked for, and was not seen to be made."""
        return any(e["what"] == what and e.get("due", False) for e in self._made)

    def add(self, resource: Resource, content: str, *, due: bool = False) -> None:
        """Record a resource with its content, or before it is made (""); the record is
        on disk on return. due: see `is_due`."""
        if resource.delete is None:
            return
        entry = {
            "what": resource.what,
            "owner": resource.owner,
            "runs": resource.runs,
            "keeps": resource.keeps,
            "content": content,
            "due": due,
            "delete": list(resource.delete.arguments),
            "deadline_s": resource.delete.deadline_s,
        }
        if entry not in self._made:
            self._made = [*self._without(resource.what), entry]
            self._write()

    def remove(self, what: str) -> None:
        """Remove a resource that no longer exists from the record."""
        self._made = self._without(what)
        self._write()

    def _without(self, what: str) -> list[dict[str, Any]]:
        return [entry for entry in self._made if entry["what"] != what]

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json({"on": self._on, "made": self._made}, self._path)
