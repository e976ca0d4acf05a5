"""Python's garbage collector while a process starts.

A start makes a third of a million objects that stay: modules, and traces of programs.
The collector looks at all of them again whenever they have grown by a quarter, which
took about a sixth of the start of a small island; later they would be looked at in
every full collection, amid a boundary.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing inside, and never look again at what there is at its end.

    For imports and compilations of our own processes: a cycle of what was made before
    the end of it is never freed. If the collector is off, it stays so, and nothing
    happens.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
