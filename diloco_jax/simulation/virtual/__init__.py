"""Virtual time: the real protocol, both halves of it, driven by an event queue."""
