"""SpecBench: every speculative drafter behind one protocol, one trainer, one tree verifier and one clock."""
