"""Virtual time: the production policy, driven by an event queue."""
