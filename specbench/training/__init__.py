"""Training: where states come from, the one trainer, checkpoints. Knows no concrete drafter."""
