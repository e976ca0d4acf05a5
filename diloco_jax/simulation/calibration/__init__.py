"""Virtual time fitted to a finished run, and the prediction of another run."""
