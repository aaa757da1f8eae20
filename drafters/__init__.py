"""One file a method. A drafter knows `specbench.engine`, `drafters.base` and its declared parent, nothing else."""
