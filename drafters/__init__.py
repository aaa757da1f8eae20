"""One file a method. A drafter imports `specbench.engine`, shared modules and its declared parent, nothing else."""
