"""One file a method. A drafter knows `specbench.engine`, `drafters.blocks` and its declared parent, nothing else."""
