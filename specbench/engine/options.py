"""What an option may be, as types: its range stands where the option is declared. Knows nothing else in the project.

The doors hold a configuration to these types before anything is loaded (`specbench/schema.py`).
"""

from typing import Annotated

from annotated_types import Ge, Gt, Interval

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Weight = Annotated[float, Ge(0)]  # of a loss term, a noise, a penalty
Share = Annotated[float, Interval(ge=0, le=1)]
