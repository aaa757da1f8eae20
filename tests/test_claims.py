"""The ledger of claims: every verdict from synthetic rows, and the shipped list well-formed."""

import numpy as np
import pytest
from conftest import DRAFTERS, ROOT

from specbench import metrics
from specbench.errors import SpecBenchError
from specbench.metrics import Totals
from specbench.records import Row
from specbench.reporting import claims
from specbench.reporting.bundle import claims_listed
from specbench.reporting.claims import INCONCLUSIVE, NOT_REPRODUCED, NOT_RUN, REPRODUCED, Evidence


def evidence(accepted, speed=1.0, questions=12, parameters=100):
    """Rows whose cycles accept `accepted[i % len]` tokens in turn; the baseline's beside them."""
    rows, baseline = [], []
    for q in range(questions):
        path = [accepted[(q + c) % len(accepted)] for c in range(10)]
        tokens = [0] * (1 + sum(path) + len(path))
        ours = Row("x", str(q), "", 0, 5, tokens, 0.1, len(tokens) / speed, accepted=path, drafted=[5] * len(path))
        ours.nodes, ours.peak, ours.draft_s = [5] * len(path), {"resident": 2**20}, 1.0
        rows.append(ours)
        baseline.append(Row("none", str(q), "", 0, 5, tokens, 0.1, float(len(tokens)), accepted=[0] * (len(tokens) - 1)))
        baseline[-1].target_s = len(tokens) - 1.0  # a second a pass; drafting takes a second a question, 0.1 a cycle
    return Evidence(Totals.of(rows, baseline), len(rows), parameters, target_parameters=1000, passes=2), rows


def verdict(test, known, files=None):
    return claims.ledger([{"tests": [test]}], lambda _: known, files or {})[0].verdict


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ({"metric": "tau", "of": "good", "over": "poor", "is": "more"}, REPRODUCED),
        ({"metric": "tau", "of": "good", "over": "poor", "is": "less"}, NOT_REPRODUCED),
        ({"metric": "tau", "of": "good", "over": "good", "is": "more"}, INCONCLUSIVE),
        ({"metric": "tau", "of": "good", "over": "absent", "is": "more"}, NOT_RUN),
        ({"metric": "tau", "of": "good", "over": "poor", "is": "more", "by": 1.5}, REPRODUCED),
        ({"metric": "tau", "of": "good", "over": "poor", "is": "more", "by": 2.5}, NOT_REPRODUCED),
        ({"metric": "speed_up", "of": "good", "over": "poor", "is": "more"}, REPRODUCED),
        ({"metric": "speed_up", "of": "poor", "over": "poor", "within": 0.05}, REPRODUCED),
        ({"metric": "speed_up", "of": "good", "over": "poor", "within": 0.05}, NOT_REPRODUCED),
        ({"metric": "late_alpha", "of": "good", "over": "poor", "is": "more"}, REPRODUCED),
        ({"metric": "alpha0", "of": "good", "over_metric": "alpha4", "is": "more"}, REPRODUCED),
        ({"metric": "parameters", "of": "good", "over": "poor", "is": "less"}, REPRODUCED),
        ({"metric": "memory", "of": "good", "over": "poor", "within": 0.01}, REPRODUCED),
        ({"metric": "draft_ms", "of": "good", "over": "poor", "within": 0.01}, REPRODUCED),
        ({"metric": "tau", "of": "poor", "than": 1.9, "is": "more"}, REPRODUCED),
        ({"metric": "tau", "of": "poor", "than": 2.1, "is": "more"}, NOT_REPRODUCED),
        ({"metric": "draft_cost", "of": "good", "over_metric": "draft_cost_by_parameters", "within": 0.1}, REPRODUCED),
        ({"metric": "draft_cost", "of": "poor", "over_metric": "draft_cost_by_parameters", "within": 0.1}, NOT_REPRODUCED),
        ({"file": "numbers.json", "of": "a.1", "over": "a.2", "within": 0.1}, REPRODUCED),
        ({"file": "numbers.json", "of": "a.3", "over": "a.2", "is": "more", "by": 0.5}, REPRODUCED),
        ({"file": "numbers.json", "of": "a.3", "over": "a.2", "within": 0.1}, NOT_REPRODUCED),
        ({"file": "numbers.json", "of": "a.words", "over": "a.2", "within": 0.1}, NOT_RUN),
        ({"file": "numbers.json", "of": "a.2", "over": "a.nothing", "within": 0.1}, NOT_RUN),
        ({"file": "numbers.json", "of": "a.1.deeper", "over": "a.2", "within": 0.1}, NOT_RUN),
        ({"file": "missing.json", "of": "a.3", "over": "a.2", "within": 0.1}, NOT_RUN),
    ],
)
def test_verdicts(test, expected):
    files = {"numbers.json": {"a": {"1": 10.2, "2": 10.0, "3": 30.0, "words": "x", "nothing": 0}}}
    known = {"good": evidence([3, 3, 4, 2], speed=2.0, parameters=50)[0], "poor": evidence([1, 1, 2, 0])[0]}
    assert verdict(test, known, files) == expected


def test_a_claim_is_as_good_as_its_worst_test():
    known = {"good": evidence([3, 3, 4, 2])[0], "poor": evidence([1, 1, 2, 0])[0]}
    right = {"metric": "tau", "of": "good", "over": "poor", "is": "more"}
    wrong, open_, absent = {**right, "is": "less"}, {**right, "over": "good"}, {**right, "over": "absent"}
    for tests, expected in (
        ([right, right], REPRODUCED),
        ([right, open_], INCONCLUSIVE),
        ([open_, wrong, right], NOT_REPRODUCED),
        ([wrong, absent], NOT_RUN),
    ):
        assert claims.ledger([{"tests": tests}], lambda _: known, {})[0].verdict == expected


def test_late_acceptance_is_everything_behind_the_first_step():
    e, rows = evidence([0, 1, 5, 3])
    tried = passed = 0
    for row in rows:
        for accepted, drafted in zip(row.accepted, row.drafted, strict=True):
            for depth in range(2, drafted + 1):
                if accepted >= depth - 1:
                    tried, passed = tried + 1, passed + (accepted >= depth)
    assert float(e.rate("late_alpha")(e.totals.pooled())) == pytest.approx(passed / tried)


def test_effects_are_those_of_a_bootstrap_written_out():
    ours, rows = evidence([0, 1, 5, 3])
    theirs, other = evidence([2, 2, 0])
    found = claims.compare({"metric": "tau", "of": "a", "over": "b", "is": "more"}, {"a": ours, "b": theirs}, {})
    names = sorted({r.question for r in rows})
    effects = []
    for sample in metrics.draws(len(names)):
        asked = [names[i] for i in sample]
        taus = [metrics.tau([r for q in asked for r in part if r.question == q]) for part in (rows, other)]
        effects.append(taus[0] - taus[1])
    assert found is not None
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(effects, [2.5, 97.5])))
    assert found.value == pytest.approx(metrics.tau(rows) - metrics.tau(other))


def test_an_unknown_metric_is_named():
    with pytest.raises(SpecBenchError, match="unknown metric beauty"):
        verdict({"metric": "beauty", "of": "a", "over": "a", "is": "more"}, {"a": evidence([1])[0]})


def test_the_shipped_claims_are_well_formed():
    listed = claims_listed(ROOT / "results" / "claims")
    assert len(listed) > 15
    for claim in listed:
        for test in claim["tests"]:
            if "file" not in test:
                names = [test[k].split(":")[-1].split("-")[0] for k in ("of", "over") if k in test]
                assert any(n in DRAFTERS for n in names) or claim["run"].startswith("there is no")
    verdicts = claims.ledger(listed, lambda _: {}, {})
    assert {v.verdict for v in verdicts} == {NOT_RUN}
    shown = claims.markdown(verdicts)
    assert all(claim["run"] in shown and claim["says"] in shown for claim in listed)
