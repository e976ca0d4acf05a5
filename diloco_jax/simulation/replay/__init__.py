"""A recorded run, once more: from config, text and tape, bit for bit."""
