"""SpecBench: every speculative drafter behind one protocol, one trainer, one tree verifier and one clock."""

__version__ = "0.1.0"
