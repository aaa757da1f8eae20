"""A day on a lent GPU: what each stage runs, what it takes along and what comes back, see docs/gpu.md."""
