"""People are told of islands that stay away, that are back, and that none is left."""

from kit import begun, joined, of, scene, scenes

from diloco_jax.protocol.coordinator.state import Alert


# A lease is 100 s, and so is the time before people are told.
@scenes(
    """
an absence that lasts is told once, and so is the return
    joined a b c reunion_s=5
    b.away +90 a=0 c=0 +9 ->
    +1 -> alert island 'b' is absent
    a=0 c=0 +90 a=0 c=0 +90 a=0 c=0 ->
    b.2 -> out fenced:b1; alert island 'b' is back
    b.away +50 a=0 c=0 +50 -> alert island 'b' is absent
an island that blinks is not told of
    joined a b c reunion_s=5
    b.away +90 a=0 c=0 b.back ->
    +90 a=0 b=0 c=0 +90 a=0 b=0 c=0 ->
silence counts from the end of the lease
    joined a b c reunion_s=5
    +90 a=0 c=0 +10 +80 a=0 c=0 +19 ->
    +1 -> alert island 'b' is absent
who returns alone is told of once the others could be back
    joined a b c reunion_s=5
    b.away c.away +90 a=0 +10 -> alert islands 'b', 'c' are absent
    b.back ->
    deadline -> 5
    +4 ->
    +1 -> alert island 'b' is back
    b.away +80 a=0 +20 -> alert island 'b' is absent
islands that are cut off one after the other are one alert
    # The first deadline is the first island's, and the alert waits for the others.
    joined a b c d reunion_s=5
    b.away +5 c.away +1 d.away +90 a=0 ->
    deadline -> 4
    +4 -> alert islands 'b', 'c' are absent
    deadline -> 6
    +6 -> alert island 'd' is absent
no island left is told apart, even if one said goodbye
    # Who stays away as the first one is back may follow it.
    joined a b c reunion_s=5
    a.leaves +10 b.away c.away +99 ->
    +1 -> alert no island is left
    +5000 ->
    a.2 -> alert island 'a' is back
    +90 a=0 ->
    +10 -> alert islands 'b', 'c' are absent
time alone tells
    joined a b c reunion_s=5
    a.away b.away c.away
    deadline -> 100
    +100 -> alert no island is left
    deadline -> none
nobody is missed once the run ends
    joined a b total_tokens=100
    +20 b.away +50 a=10 +30 ->
    deadline -> 70
    +69 ->
    phases -> stopping idle idle
"""
)
def test_a_scene_of_absences(first: str, text: str) -> None:
    scene(begun(first, joined=joined), text)


def test_islands_that_are_cut_off_together_are_one_alert() -> None:
    d = joined("a", "b", "c", *(f"d{n}" for n in range(20)), reunion_s=5.0)
    gone = [name for name in d.state.islands if name != "a"]
    for name in gone:
        d.wait(0.1)
        d.disconnect(name)
    d.report("a")
    (alert,) = of(d.wait(d.config.lease_s - 1), Alert)
    assert "islands 'b', 'c', 'd0'" in alert.text
    assert " and 14 more are absent" in alert.text
    assert "1 of 23 islands are left" in alert.text
    d.report("a")
    (alert,) = of([effect for name in gone for effect in d.hello(name)], Alert)
    assert " and 14 more are back; 23 of 23" in alert.text


def test_that_none_is_left_is_told_with_all_names_and_its_end_with_the_time() -> None:
    d = joined("a", "b", "c")
    d.play("a.leaves b.away c.away +100")
    (alert,) = of(d.effects, Alert)
    assert "no island is left: islands 'a', 'b', 'c' are absent or gone" in alert.text
    d.now += 5000
    (alert,) = of(d.hello("a", incarnation=2), Alert)
    assert "island 'a' is back: for 5100 s no island was left; 1 of 3" in alert.text
