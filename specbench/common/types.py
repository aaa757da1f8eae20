"""Types of options with their ranges, against which `specbench/config/validation.py` validates a configuration."""

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

LOWEST, HIGHEST = 1e-4, 1e6  # temperatures beyond which logits overflow, or probabilities are all alike, in float32


def _temperature(value: float) -> float:
    if value and not LOWEST <= value <= HIGHEST:
        raise ValueError(f"must be 0, or from {LOWEST:g} to {HIGHEST:.0f}")
    return value


Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]  # of a loss term, a noise, a penalty
Temperature = Annotated[float, Field(ge=0), AfterValidator(_temperature)]  # 0: greedy
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.+=@-]{0,99}$")]  # becomes a folder's name
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, StringConstraints(min_length=1)]
