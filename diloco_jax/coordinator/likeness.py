"""Check that an island trains the coordinator's config and model."""

from __future__ import annotations

from diloco_jax.config import RunConfig, differences, shared_fields
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.models.plan import other_model
from diloco_jax.protocol import messages


class Likeness:
    """Compare what islands say about themselves with the run."""

    def __init__(self, run: RunConfig, plan: FragmentPlan) -> None:
        self._shared, self._fingerprint = shared_fields(run), run.fingerprint()
        self._plan = plan.digest()

    def differences(self, hello: messages.Hello) -> list[str]:
        """Return the differences, field by field, here and there; empty for the same
        run."""
        if hello.fingerprint != self._fingerprint:
            prints = f"fingerprint: {self._fingerprint} here, {hello.fingerprint} there"
            return [*differences(self._shared, hello.run), prints]
        return other_model(self._plan, hello.plan)
