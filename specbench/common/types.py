"""Types of options with their ranges, against which `specbench/config/validation.py` validates a configuration.

Every number has a smallest and a largest value. Where an option decides how much memory is reserved or how many passes run,
the largest is well above what any method uses, and small enough for no machine to be exhausted by one option alone.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

LOWEST, HIGHEST = 1e-4, 1e6  # temperatures beyond which logits overflow, or probabilities are all alike, in float32
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,99}$"
MAX_COUNT = 2**31 - 1
MAX_DEPTH, MAX_WIDTH, MAX_NODES = 256, 256, 1024  # of a tree


def _temperature(value: float) -> float:
    if value and not LOWEST <= value <= HIGHEST:
        raise ValueError(f"must be 0, or from {LOWEST:g} to {HIGHEST:.0f}")
    return value


def is_name(text: str) -> bool:
    """Can it name a folder, see `Name`?"""
    return re.fullmatch(NAME.strip("^$"), text) is not None


# What is gone through one by one, with no memory reserved for it.
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Repetitions = Annotated[int, Field(ge=0, le=1000)]  # of a measurement or a warm-up
Times = Annotated[int, Field(ge=1, le=1000)]  # how often the same is done: epochs, batches a step
Steps = Annotated[int, Field(ge=1, le=10**7)]  # of a training
# Trees, chains and copied drafts.
Depth = Annotated[int, Field(ge=1, le=MAX_DEPTH)]  # levels, tokens of a path, passes a cycle
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]  # candidates of a node, nodes of a level
Rank = Annotated[int, Field(ge=0, lt=MAX_WIDTH)]  # of a candidate among its siblings, 0 the best
Nodes = Annotated[int, Field(ge=2, le=MAX_NODES)]  # of a tree, the root included
DraftNodes = Annotated[int, Field(ge=1, lt=MAX_NODES)]  # of a tree, without the root
Length = Annotated[int, Field(ge=1, le=64)]  # of an n-gram, of which all in a text are kept
# Models.
Tokens = Annotated[int, Field(ge=1, le=2**20)]  # of a context, a prompt, an answer
Ids = Annotated[int, Field(ge=1, le=2**24)]  # of a vocabulary
Layers = Annotated[int, Field(ge=1, le=256)]
Units = Annotated[int, Field(ge=1, le=2**17)]  # of a layer
OptionalUnits = Annotated[int, Field(ge=0, le=2**17)]  # of a layer that there need not be
Rows = Annotated[int, Field(ge=1, le=4096)]  # of a batch; clients of a server
Few = Annotated[int, Field(ge=0, le=256)]  # layers or phrases beside what there is; 0: none
Threads = Annotated[int, Field(ge=1, le=4096)]
# Continuous quantities.
Positive = Annotated[float, Field(ge=1e-9, le=1e6)]  # a rate, a bandwidth, a number of parameters
Weight = Annotated[float, Field(ge=0, le=1e6)]  # of a loss term, a noise, a penalty
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=1e-3, le=64)]  # of a layer's size to another's
Duration = Annotated[float, Field(ge=1e-6, le=1e6)]  # s, or min of a whole command
Delay = Annotated[float, Field(ge=0, le=1e6)]  # ms, or min between two events
Temperature = Annotated[float, Field(ge=0), AfterValidator(_temperature)]  # 0: greedy
# Texts.
Name = Annotated[str, StringConstraints(pattern=NAME)]  # becomes the name of a folder or file
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Address = Annotated[str, StringConstraints(pattern=r"^https?://[^/]+/.*[^/]$")]  # of a file on the web
Text = Annotated[str, StringConstraints(min_length=1)]
