"""`diloco plan`: estimate what a config needs of real TPU slices, without a TPU."""
