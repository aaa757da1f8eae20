"""Llama-2 and Vicuna run on GPUs in float16, as their checkpoints and the papers; ties are no failures of a claim."""

import pytest
import torch
import yaml
from conftest import ROOT, settled

from specbench.engine.device import pick_dtype
from specbench.records.metrics import RATES, sum_rows
from specbench.records.rows import Row

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT16 = {"llama2-7b", "llama2-13b", "llama2-70b", "vicuna-7b", "vicuna-13b", "vicuna-33b"}


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_model_runs_in_its_precision(path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    random = ["model.weights=random", "alpha=[0.5]"] if "shape" in yaml.safe_load(path.read_text()) else []
    model = settled("none", f"model={path.stem}", *random).model
    expected = torch.float16 if path.stem in FLOAT16 else torch.bfloat16
    assert model.dtype == "auto" and pick_dtype(model.dtype, CUDA, model.gpu_dtype) == expected
    assert pick_dtype(model.dtype, CPU, model.gpu_dtype) == torch.float32
    assert pick_dtype("bfloat16", CUDA, model.gpu_dtype) == torch.bfloat16, "what is asked for counts"


def test_a_replay_runs_in_float32_all_the_same():
    assert settled("none", "model=llama2-7b", "replay=true").model.dtype == "float32"


@pytest.mark.parametrize(("verdict", "share"), [("identical", 1), ("numerical tie", 1), ("bug", 0)])
def test_a_claim_of_equal_answers_fails_by_bugs_alone(verdict, share):
    rows = [Row("a", "q", "c", 0, 3, [1, 2], 0.1, 0.1, [1], [1], [0], [[]], [1], audit={"verdict": verdict}, text="t")]
    totals = sum_rows(rows, rows)
    assert RATES["lossless"](totals.pooled) == share
