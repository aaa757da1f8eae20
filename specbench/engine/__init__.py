"""The engine: trees, growth, cache, target, verification and the decode loop. Knows no drafter, dataset or config."""
