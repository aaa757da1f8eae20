"""What tau to expect of longer trainings: curves that are known are found again, and the table holds what it says."""

import math

import pandas as pd
import pytest

from specbench.reporting import learning

TOKENS = [2e6 * i for i in range(1, 11)]


def test_a_bounded_and_a_straight_curve_are_found_again():
    bounded = [(n, 6 - 9.0 * n**-0.12) for n in TOKENS]
    straight = [(n, -4 + 0.4 * math.log(n)) for n in TOKENS]
    low, high = learning.expected(bounded, 6.0)
    assert low == pytest.approx(6 - 9.0 * learning.PAPERS**-0.12) and low < high < 6
    low, high = learning.expected(straight, 6.0)
    assert high == pytest.approx(-4 + 0.4 * math.log(learning.PAPERS)) and low < high


def test_no_expectation_exceeds_the_bound():
    steep = [(n, -20 + 1.5 * math.log(n)) for n in TOKENS]
    assert learning.expected(steep, 6.0)[1] == 6.0


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(2e6 * i, 1.5) for i in range(1, learning.FEWEST)],
        [(2e6, 1.5)] * 20,
        [(n, 6.0) for n in TOKENS],
        [(n, math.nan) for n in TOKENS],
        [(0, 1.5) for _ in TOKENS],
    ],
)
def test_too_few_points_are_no_curve(points):
    assert learning.expected(points, 6.0) is None


@pytest.mark.parametrize(
    ("growth", "levels"),
    [
        ({"depth": 6, "top_k": 10, "nodes": 60}, 6),
        ({"gamma": 4, "candidates": "sample"}, 4),
        ({"nodes": 64, "unmeasured": [[0], [0, 0], [0, 0, 1], [1]]}, 3),
        ({"choices": "eagle1"}, None),
        ({}, None),
    ],
)
def test_levels_are_read_off_a_policys_options(growth, levels):
    assert learning.deepest(growth) == levels


def provenance(name, **more):
    history = [{"tokens": int(n), "chain_tau": 1 + n / 2e7, "n_alpha": [0.5] * 5, "tree_tau": 1 + n / 1e7} for n in TOKENS]
    return {"drafter": {"name": name, "growth": {"depth": 6}}, "tokens_seen": int(TOKENS[-1]), "history": history} | more


def test_the_table_sets_expected_beside_published():
    columns = ["drafter", "dataset", "metric", "temperature", "number"]
    numbers = [
        ("hass", "mtbench", "tau", "0", 4.2),
        ("hass", "mtbench", "tau", "", 5.1),
        ("hass", "mtbench", "tau", "1", 9.0),
        ("hass", "gsm8k", "tau", "0", 9.0),
        ("hass", "mtbench", "speed_up", "0", 9.0),
    ]
    weights = {"hass": provenance("hass"), "mine": provenance("mine"), "brief": provenance("brief", history=[])}
    weights["continued"] = provenance("continued", tokens_before=10**7)
    hass, mine = learning.lines(weights, pd.DataFrame(numbers, columns=columns))
    assert len(hass) == len(learning.COLUMNS)
    assert hass[:4] == ["hass", "20,000,000", "10", "2.00"] and hass[5] == "3.00" and hass[7] == "4.2 to 5.1"
    assert mine[7] == "-"


def test_older_curves_without_trees_have_their_chains():
    weights = {
        "old": provenance(
            "old", history=[{k: v for k, v in h.items() if k != "tree_tau"} for h in provenance("old")["history"]]
        )
    }
    (line,) = learning.lines(weights, pd.DataFrame(columns=["drafter", "dataset", "metric", "temperature", "number"]))
    assert " to " in line[4] and line[5:] == ["-", "-", "-"]
