"""Repetition of a recorded run from config, text and tape, bit for bit."""
