"""Times for which an island was away, as the closing report tells them."""

from diloco_jax.cluster.cluster import OUTAGES_KEPT, Outages


def test_an_outage_lasts_until_the_next_incarnation_does_steps():
    outages = Outages()

    def seen(incarnation, steps, now):
        outages.observe(
            {"islands": {"a": {"incarnation": incarnation, "steps": steps}}}, now
        )

    seen(1, 40, 1.0)
    outages.down("a", 2.0)
    outages.down("a", 3.0)
    seen(1, 40, 4.0)
    seen(2, 0, 5.0)
    assert outages.by_island() == {"a": [None]}
    seen(2, 1, 6.5)
    assert outages.by_island() == {"a": [4.5]}
    outages.down("a", 9.0)
    assert outages.by_island() == {"a": [4.5, None]}
    for incarnation in range(3, 100):
        seen(incarnation, 1, float(incarnation))
        outages.down("a", float(incarnation))
    assert outages.by_island() == {"a": [*[1.0] * OUTAGES_KEPT, None]}
