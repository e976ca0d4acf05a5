"""Virtual time: the real policy, books and boundaries, driven by an event queue."""
