"""All islands of a config with real gradients, in virtual time."""
