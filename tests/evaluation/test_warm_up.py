"""The first row pays for nothing that later ones find ready; what its GPU did is written beside it."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import CUDA, install

from specbench.common.gpu import Meter, State
from specbench.data.prompts import Question
from specbench.evaluation import warm_up
from specbench.records.rows import GpuUse, Row, contradiction

CPU = torch.device("cpu")
QUESTIONS = [Question(str(n), "c", ("x" * n,)) for n in (80, 300, 100)]
CHAT = SimpleNamespace(opening=lambda question: list(range(len(question))))


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(warm_up.time, "monotonic", lambda: now.s)
    return now


def run(clock, device, times, seconds):
    made = []

    def generate(label, tokens):
        clock.s += seconds
        made.append(label)
        return tokens

    arms = {label: lambda label=label, tokens=tokens: generate(label, tokens) for label, tokens in (("a", 16), ("b", 8))}
    return warm_up.run(device, times, arms), made


def test_a_gpu_is_warmed_up_for_five_seconds_by_all_arms(clock):
    token_s, made = run(clock, CUDA, 1, 0.5)
    assert made == ["a", "b"] * 5 and token_s == pytest.approx({"a": 0.5 / 16, "b": 0.5 / 8})
    assert run(clock, CUDA, 1, 9.0)[1] == ["a", "b"]
    assert run(clock, CUDA, 3, 9.0)[1] == ["a", "b"] * 3
    assert run(clock, CUDA, 0, 0.5) == ({}, []), "a replay times nothing"
    assert run(clock, CPU, 1, 0.5)[1] == ["a", "b"]


def test_a_gpu_is_warmed_up_with_the_longest_prompt():
    assert len(warm_up.prompt(CHAT, QUESTIONS, CUDA, 4096)) == 300
    assert len(warm_up.prompt(CHAT, QUESTIONS, CUDA, 200)) == 200 - warm_up.TOKENS
    assert len(warm_up.prompt(CHAT, QUESTIONS, CPU, 4096)) == warm_up.SHORT


def test_energy_is_what_a_generation_used(monkeypatch):
    driver = install(monkeypatch)
    meter = Meter(CUDA)
    driver.joules = 100.0
    meter.start()
    driver.joules = 130.0
    use = GpuUse.read(meter)
    assert use == GpuUse(30.0, 1410, ["software power cap"], 1)
    assert use.share(0.25) == GpuUse(7.5, 1410, ["software power cap"], 1)
    driver.silent = {"nvmlDeviceGetTotalEnergyConsumption"}
    assert GpuUse.read(meter) == GpuUse(None, 1410, ["software power cap"], 1)
    assert GpuUse.read(meter).share(0.5).energy_j is None
    driver.silent = {"nvmlInit"}
    meter.start()
    assert meter.read() == State()
    meter = Meter(CPU)
    meter.start()
    assert GpuUse.read(meter) is None


@pytest.mark.parametrize("gpu", [None, GpuUse(), GpuUse(30.0, 1410, [], 0)])
def test_a_row_with_its_gpu_is_read_again(gpu):
    from specbench.common.io import parse
    from specbench.records.blocks import Line

    data = asdict(Row("none", "q", "c", 0, 3, [1], 0.1, 0.0, gpu=gpu))
    row = parse(json.dumps({"kind": data.pop("kind"), **data}).encode(), Line, "line")
    assert row.gpu == gpu and contradiction(row, ["none"]) is None
    del data["gpu"]  # as rows were written before
    assert parse(json.dumps({"kind": "prompt", **data}).encode(), Line, "line").gpu is None


def test_an_arm_that_fails_stops_no_other(capsys):
    ran = []

    def fails():
        ran.append("fails")
        raise RuntimeError("out of memory")

    def works():
        ran.append("works")
        return 1

    assert [*warm_up.run(CPU, 2, {"a": fails, "b": works})] == ["a", "b"]
    assert ran == ["fails", "works", "works"] and "a failed while warming up: " in capsys.readouterr().err
