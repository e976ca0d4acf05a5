"""`diloco doctor`: what of this machine a run depends on."""
