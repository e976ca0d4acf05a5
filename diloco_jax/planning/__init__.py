"""`diloco plan`: what a config needs of real TPU slices, found without one."""
