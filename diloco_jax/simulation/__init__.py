"""Virtual time: the production protocol, driven by an event queue."""
