"""Files of acceptance and costs that contradict themselves are refused where they are read, in one line that names them."""

import copy
import json
import random
from dataclasses import asdict

import pytest
import torch
from bending import bent
from test_fitted import COSTS, made_up

from specbench.common.errors import SpecBenchError
from specbench.common.io import read_json
from specbench.tuning.acceptance import AcceptanceFile
from specbench.tuning.cost_aware import CostAwareTree, Fitted, FittedStatic
from specbench.tuning.cost_model import CostsFile

ACCEPTANCE = json.loads(json.dumps({"weights": "0" * 64, "acceptance": asdict(made_up())}))
BENDS = 100
COST = json.loads(json.dumps({"made_for": {"timing": 1}, "costs": asdict(COSTS)}))


def use(acceptance, costs, tree):
    """Everything that is done with them."""
    for policy in (Fitted(**tree), FittedStatic(), CostAwareTree(**tree)):
        policy.fit(acceptance, costs)
    policy.kept(policy.acceptance.worth(torch.linspace(0, 1, 20)))
    policy.frontier(torch.linspace(0, 1, 20), 10, 3)


@pytest.mark.parametrize("name", ["acceptance", "costs"])
def test_what_is_read_can_be_used(tmp_path, name):
    shape, value = {"acceptance": (AcceptanceFile, ACCEPTANCE), "costs": (CostsFile, COST)}[name]
    path, refused = tmp_path / f"{name}.json", 0
    for seed in range(BENDS):
        made, how = bent(value, random.Random(seed))
        path.write_text(json.dumps(made))
        message, read = "", None
        try:
            read = getattr(read_json(path, shape), name)
        except SpecBenchError as error:
            message = str(error)
        if read is None:
            assert message.startswith(f"{path}: ") and "\n" not in message, (seed, how)
            refused += 1
        else:
            tree = {"depth": 8, "top_k": 1, "nodes": 2} if seed % 2 else {}
            use(read if name == "acceptance" else made_up(), read if name == "costs" else COSTS, tree)
    assert BENDS / 3 < refused < BENDS, "bends that are all refused, or none, test nothing"


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("tau", "4", 0), [1.0] * 3, "16 sizes of trees"),
        (("tau", "4"), [[1.0] * 16], "as many depths as ranks"),
        (("tau", "2", 0), [2.5] * 16, "exceeds the depth"),
        (("ranks", 1), [0.6, 0.6], "shares of one whole"),
        (("ranks", 1), [], "shares of one whole"),
        (("sure",), [0.0, 0.5, 0.1, 1.0], "ascending"),
        (("accepted",), [0.0, 0.5, 0.4, 1.0], "ascending"),
        (("sure",), [0.0, 1.0], "one curve"),
        (("tau",), {"2": made_up().tau[2]}, "none of top_k=1"),
    ],
)
def test_tables_that_contradict_each_other_are_refused(tmp_path, at, value, message):
    content = copy.deepcopy(ACCEPTANCE)
    *above, key = "acceptance", *at
    part = content
    for step in above:
        part = part[step]
    part[key] = value
    (tmp_path / "acceptance.json").write_text(json.dumps(content))
    with pytest.raises(SpecBenchError, match=message):
        read_json(tmp_path / "acceptance.json", AcceptanceFile)
