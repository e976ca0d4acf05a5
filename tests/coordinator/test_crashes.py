"""Crashes of a worker's process: which lines that break count as one."""

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


def test_lines_without_a_word_before_the_first_process_are_the_networks():
    crashes = Crashes(ends_with_line=False)
    for silent in (1, 2, 3):
        crashes.line_begins(20.0)
        crashes.line_broke(30.0, failed=False)
        assert (crashes.in_a_row, crashes.ends) == (silent, 0)
    crashes.line_begins(40.0)
    crashes.heard("one")
    assert crashes.in_a_row == 0


def test_an_end_that_is_told_counts_at_once_and_only_once():
    crashes = Crashes(ends_with_line=False)
    crashes.line_begins(0.0)
    crashes.heard("one")
    crashes.line_broke(10.0, failed=True)
    assert crashes.ends == 1
    crashes.line_begins(20.0)
    crashes.line_broke(30.0, failed=True)
    assert crashes.ends == 2, "it ended without a word"
    crashes.line_begins(40.0)
    crashes.heard("three")
    assert crashes.in_a_row == crashes.ends == 2


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
