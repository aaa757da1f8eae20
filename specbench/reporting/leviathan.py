"""Theory of chains (Leviathan et al.): tokens, speed-up, operations and the best length, beside measured chains.

alpha: acceptance of a draft token; gamma: length of the chain; c: seconds of a draft pass over those of a target pass;
c_hat: the same of arithmetic operations, for which parameters that are multiplied stand here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd

from specbench.records.metrics import RATES
from specbench.records.statistics import Interval, interval
from specbench.reporting.cells import Entry
from specbench.reporting.charts import Chart, Panel, Series
from specbench.reporting.document import Table
from specbench.reporting.evidence import rate
from specbench.reporting.tables import ABSENT

ALPHAS = np.linspace(0.01, 0.99, 99)
GAMMAS = (1, 3, 5, 7)  # of curves
COSTS = (0.02, 0.05, 0.1, 0.2, 0.5)  # c, of curves
MAX_GAMMA = 20
PREDICTIONS = "Leviathan numerical predictions"


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a target pass, (1 - alpha^(gamma + 1)) / (1 - alpha), also where alpha is 1."""
    return float(sum(alpha**i for i in range(gamma + 1)))


def speed_up(alpha: float, gamma: int, c: float) -> float:
    """Theorem 3.8: if a pass over a chain costs as much as one over a token."""
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Theorem 3.11: the factor by which the number of operations grows."""
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float) -> int:
    """The length with the largest speed-up; 0 where none is faster than plain decoding."""
    return max(range(MAX_GAMMA + 1), key=lambda gamma: speed_up(alpha, gamma, c))


@dataclass(frozen=True)
class Chain:
    """A measured chain. c, gain (its speed-up): None without timed rows."""

    name: str
    gamma: int
    alpha: float
    tau: Interval
    c_hat: float
    c: float | None
    gain: Interval | None

    @property
    def operations(self) -> Interval:
        """The factor of operations a token, by the tokens that a pass yields."""
        done = self.gamma * self.c_hat + self.gamma + 1
        return Interval(done / self.tau.value, done / self.tau.high, done / self.tau.low)


Curve = Callable[[float, int], float]  # of alpha and gamma
Value = Callable[[Chain], Interval | None]


def gamma_of(e: Entry) -> int:
    """Length of the chain that an arm drafts; 0 for other trees."""
    gamma = e.growth.get("gamma", 0) if str(e.growth.get("_target_")).endswith(".Chain") else 0
    return gamma if isinstance(gamma, int) else 0


def chain(counted: Entry | None, timed: Entry | None) -> Chain | None:
    """One arm in one cell. counted: its entry with most questions; timed: that with speeds. None if it drafts no chain."""
    if counted is None or not (gamma := gamma_of(counted)):
        return None
    alpha, tau = interval(RATES["alpha"], counted.totals), interval(RATES["tau"], counted.totals)
    if alpha is None or tau is None:
        return None
    c = interval(rate(timed, "draft_cost"), timed.totals) if timed else None
    gain = interval(RATES["speed_up"], timed.totals) if timed else None
    c_hat = counted.parameters / counted.header["target"]["parameters"]
    return Chain(counted.name, gamma, alpha.value, tau, c_hat, c.value if c else None, gain)


def chart(found: Mapping[str, Sequence[Chain]], numbers: pd.DataFrame) -> Chart:
    """Four panels. found: chains by cell. numbers: all published ones."""
    chains = [c for group in found.values() for c in group]
    gammas = sorted({*GAMMAS, *(c.gamma for c in chains)})
    costs = [c.c for c in chains if c.c is not None]
    c, c_hat = median(costs) if costs else COSTS[2], median([c.c_hat for c in chains]) if chains else 0.0
    by_gamma = {f"γ={gamma}": gamma for gamma in gammas}
    best = {f"c={cost:g}": [(float(a), float(best_gamma(float(a), cost))) for a in ALPHAS] for cost in COSTS}

    def curves(of: Curve, top: float) -> dict[str, list[tuple[float, float]]]:
        made = {name: [(float(a), of(float(a), gamma)) for a in ALPHAS] for name, gamma in by_gamma.items()}
        return {name: [p for p in line if p[1] <= top] for name, line in made.items()}

    def points(y: Value) -> list[Series]:
        return [Series(name, [(c.alpha, v) for c in group if (v := y(c))], joined=False) for name, group in found.items()]

    gains, growth = (
        curves(lambda a, gamma: speed_up(a, gamma, c), 4.0),
        curves(lambda a, gamma: operations(a, gamma, c_hat), 9.0),
    )
    short = {name: [p for p in line if p[1] <= 12] for name, line in best.items()}
    panels = [
        Panel("alpha", "tokens a target pass", points(lambda c: c.tau), guides=curves(expected_tokens, 6.0), top=6.0),
        Panel("alpha", "speed-up", points(lambda c: c.gain), guides=gains, top=4.0),
        Panel("alpha", "operations over plain decoding's", points(lambda c: c.operations), guides=growth, top=9.0),
        Panel("alpha", "best γ", _best(found), guides=short, top=12.5),
    ]
    notes = [f"curves: theory, the speed-up's at c = {c:.2g}{', the median measured' if costs else ''}",
             f"operations at ĉ = {c_hat:.2g}", "points: chains measured here"]  # fmt: skip
    return Chart(panels, notes, [predictions(numbers), *_measured(found)])


def _best(found: Mapping[str, Sequence[Chain]]) -> list[Series]:
    """The fastest measured length of each cell, and the theory's at the acceptance and cost of that chain."""
    series = []
    for name, group in found.items():
        timed = [(c.gain.value, c, c.c) for c in group if c.gain and c.c is not None]
        if len(timed) > 1:
            _, fastest, cost = max(timed, key=lambda t: t[0])
            measured, theory = float(fastest.gamma), float(best_gamma(fastest.alpha, cost))
            series.append(Series(name, [(fastest.alpha, Interval(measured, measured, measured))]))
            label = f"{name}: theorem at c={cost:.2g}"
            series.append(Series(label, [(fastest.alpha, Interval(theory, theory, theory))]))
    return series


def predictions(numbers: pd.DataFrame) -> Table:
    """The formulas at the acceptances and lengths for which the slides print them, at no draft cost."""
    printed: dict[tuple[float, int], dict[str, str]] = {}
    for cell in numbers[numbers["table"] == PREDICTIONS].itertuples():
        at = dict(part.split("=") for part in str(cell.variant).split("; "))
        printed.setdefault((float(at["alpha"]), int(at["gamma"])), {})[str(cell.metric)] = str(cell.value)
    lines = [
        [f"{alpha:g}", str(gamma), f"{operations(alpha, gamma, 0):.2f}", values.get("operations", ABSENT),
         f"{speed_up(alpha, gamma, 0):.2f}", values.get("predicted_speed_up", ABSENT)]
        for (alpha, gamma), values in printed.items()
    ]  # fmt: skip
    columns = ("alpha", "gamma", "operations, Theorem 3.11", "printed", "speed-up, Theorem 3.8", "printed")
    return Table(columns, lines, "Numerical predictions at no draft cost (c = 0)")


def _measured(found: Mapping[str, Sequence[Chain]]) -> list[Table]:
    """Measured chains beside what theory says at their acceptance and cost."""
    lines = []
    for name, group in found.items():
        for c in group:
            theory = "" if c.c is None else f" ({speed_up(c.alpha, c.gamma, c.c):.2f})"
            lines.append([
                f"{c.name}, {name}", str(c.gamma), f"{c.alpha:.2f}",
                f"{c.tau.value:.2f} ({expected_tokens(c.alpha, c.gamma):.2f})",
                f"{c.operations.value:.2f} ({operations(c.alpha, c.gamma, c.c_hat):.2f})",
                ABSENT if c.c is None else f"{c.c:.2f}",
                (f"{c.gain.value:.2f}" if c.gain else ABSENT) + theory,
                ABSENT if c.c is None else str(best_gamma(c.alpha, c.c)),
            ])  # fmt: skip
    columns = ("chain", "gamma", "alpha", "tokens (theory)", "operations (theory)", "c", "speed-up (theory)", "best gamma")
    return [Table(columns, lines, "Measured chains, in brackets the theory at their alpha and c")] if lines else []
