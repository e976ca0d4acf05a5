"""The adopt rule "keep": "rebase", beside a delta that no version has yet."""

from __future__ import annotations

from diloco_jax.core.adopt.rebase import Rebase


class Keep(Rebase):
    """See `AdoptRule`."""

    keeps_pending = True


KEEP = Keep()
