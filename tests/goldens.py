"""Golden files: what users read and programs parse, as it was when it last changed."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("golden")
REGENERATE = bool(os.environ.get("REGENERATE"))
"""Write the golden files that differ. Only in a commit that names the difference."""


def require_golden(name: str, found: str) -> None:
    """Fail with the difference between a golden file and what is found now."""
    __tracebackhide__ = True
    path = FOLDER / name
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if REGENERATE and golden != found:
        path.write_text(golden := found, encoding="utf-8")
    difference = "\n".join(
        difflib.unified_diff(
            *(golden.splitlines(), found.splitlines()),
            *(f"tests/golden/{name}", "found"),
            lineterm="",
        )
    )
    # Not an assertion on the texts: pytest would take minutes over their difference.
    if golden != found:
        raise AssertionError(
            f"{name} differs from its golden file:\n{difference}\n"
            f"if it is meant, run this test once more with REGENERATE=1, and name the "
            f"difference in the message of that commit"
        )


def as_text(value: Any) -> str:
    """Return a JSON value, one field a line, for `require_golden`."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def shape(*values: Any, open_at: tuple[str, ...] = (), where: str = "") -> Any:
    """Return the fields of JSON values with the types that they have among them; `?`
    behind a field that some lack. A dict at `open_at` has keys of any name, `*`."""
    dicts = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    found: list[Any] = []
    if dicts:
        keys = {key: None for value in dicts for key in value}
        if where in open_at:
            below = [v for value in dicts for v in value.values()]
            found.append({"*": shape(*below)})
        else:
            found.append(
                {
                    key + "?" * any(key not in value for value in dicts): shape(
                        *(value[key] for value in dicts if key in value),
                        open_at=open_at,
                        where=key,
                    )
                    for key in keys
                }
            )
    if lists:
        below = [v for value in lists for v in value]
        found.append([shape(*below)] if below else [])
    plain = {type(v).__name__ for v in values if not isinstance(v, dict | list)}
    if plain:
        found.append(" | ".join(sorted(plain)))
    return found[0] if len(found) == 1 else found
