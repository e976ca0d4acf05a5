"""What counts as a crash of a worker's process."""

from diloco_jax.coordinator.workers.crashes import Crashes


def test_lines_without_a_word_count_until_the_same_process_speaks():
    """A process that lives for weeks meets some of them."""
    crashes = Crashes(ends_with_line=False)
    crashes.line_begins(0.0)
    crashes.heard("one")
    crashes.line_broke(10.0, failed=False)
    for silent in (1, 2, 3):
        crashes.line_begins(20.0)
        crashes.line_broke(30.0, failed=False)
        assert crashes.in_a_row == silent
    crashes.line_begins(40.0)
    crashes.heard("one")
    assert crashes.in_a_row == 0


def test_lines_without_a_word_count_if_another_process_speaks():
    crashes = Crashes(ends_with_line=False)
    crashes.line_begins(0.0)
    crashes.heard("one")
    crashes.line_broke(10.0, failed=False)
    crashes.line_begins(20.0)
    crashes.line_broke(30.0, failed=False)
    crashes.line_begins(40.0)
    crashes.heard("two")
    assert crashes.in_a_row == 2
