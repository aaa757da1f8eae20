"""Imported before torch, this lets threads sleep while they wait for one another, unless the user has said how they should.

Threads that spin instead are faster on an idle machine, which timed runs are made on, and many times slower as soon as
anything else runs beside them: so corpora are written, drafters trained and tests run with `OMP_WAIT_POLICY=PASSIVE`.
A search times passes for decoding, and waits as that does.
"""

import os
import sys

# Where torch is there already it has read the policy; only processes started from here would notice.
if "torch" not in sys.modules and "train.until=search" not in sys.argv:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
