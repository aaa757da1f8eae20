"""Import before torch: sets `OMP_WAIT_POLICY=PASSIVE` for training and tests, unless the user has set a policy.

Spinning threads, the default, are faster on an idle machine, as in timed runs, but many times slower as soon as anything
else runs. A search for layers to skip times passes for decoding, so it waits as decoding does.
"""

import os
import sys

# If torch is imported already, it has read the policy, and only child processes would change.
if "torch" not in sys.modules and "train.until=search" not in sys.argv:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
