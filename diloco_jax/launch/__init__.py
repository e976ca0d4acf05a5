"""`diloco launch`: from a config to machines in the cloud that run it."""
