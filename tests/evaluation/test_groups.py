"""Arms that memory does not hold beside one target at once are decoded in groups, which shapes tell before loading."""

import gc
import weakref
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from command_line import read_rows
from conftest import composed, settled

from specbench.common import environment
from specbench.common.budget import Budget
from specbench.config import run_spec
from specbench.engine import loading, memory
from specbench.engine.memory import Estimate, NoRoom
from specbench.engine.pretrained import config_of
from specbench.evaluation import arms, run, study, study_runs
from specbench.evaluation.study import Ready, _Decoder
from specbench.records import trainings
from specbench.records.blocks import NAME
from specbench.reporting.groups import Asked, measured

GB = 10**9
RANDOM = ("model=llama2-7b", "model.weights=random", "alpha=[0.8]")
SEVERAL = ("eagle2", "hass", "coral", "beagle", "medusa", "vanilla", "moa", "hydra", "eagle3", "mtp")


@pytest.fixture
def llama(monkeypatch):
    """Llama-2-7B's shape in float16 on a GPU, of which nothing is loaded, and drafters for it."""
    monkeypatch.setattr(loading, "pick_device", lambda device: torch.device("cuda"))
    spec = settled("none", *RANDOM)
    drafters = [settled(name, *RANDOM).make_drafter() for name in SEVERAL]
    return spec.model, drafters


def estimates(model, drafters):
    config = config_of(model.shape, "shape")
    return [memory.estimate(config, torch.float16, torch.device("cuda"), model.max_context, [d]) for d in drafters]


def test_drafters_beside_a_7b_target_in_24_48_and_80_gb(llama, monkeypatch):
    model, drafters = llama
    free = {24: 23.2 * GB, 48: 47 * GB, 80: 79 * GB}  # a card's memory without the context of a process
    found = {}
    for card, size in free.items():
        monkeypatch.setattr(environment, "free_memory", lambda device, everywhere=False, size=size: int(size))
        found[card] = model.groups(drafters)
    everyone = list(range(len(drafters)))
    assert found[80] == found[48] == [everyone]
    assert len(found[24]) == 2 and sorted(chain(*found[24])) == everyone
    alone = estimates(model, drafters)
    for group in found[24]:
        assert memory.together([alone[i] for i in group]).needed <= free[24]
    whole = memory.estimate(
        config_of(model.shape, "shape"), torch.float16, torch.device("cuda"), model.max_context, drafters
    )
    assert free[24] < whole.needed == memory.together(alone).needed < free[48], "estimates add up"


def test_what_does_not_fit_alone_is_in_no_group(llama, monkeypatch):
    model, drafters = llama
    alone = estimates(model, drafters)
    largest = max(range(len(alone)), key=lambda index: alone[index].needed)
    size = sorted(one.needed for one in alone)[-2]
    monkeypatch.setattr(environment, "free_memory", lambda device, everywhere=False: size)
    groups = model.groups(drafters)
    assert SEVERAL[largest] == "moa" and {*chain(*groups)} == {*range(len(drafters))} - {largest}


def test_each_drafter_goes_into_the_first_group_with_room():
    alone = [Estimate(10 * GB, drafters={name: size * GB}) for name, size in (("a", 3), ("b", 5), ("c", 2), ("d", 9))]
    room = (10 + 6) * GB * 11 // 10  # beside a target of 10 GB, and a tenth of it all as headroom
    assert memory.groups(alone, room) == [[0, 2], [1]]
    assert memory.groups(alone, 100 * GB) == [[0, 1, 2, 3]] and memory.groups(alone, GB) == []


def words_of(home, folder):
    words = [f"model.path={home / 'model'}", "model.name=tiny", "model.wheel=null", "model.dtype=float32", "threads=1"]
    words += [f"results={folder}", f"data.root={home}", "data.limit=2", "decode.max_new_tokens=6", "decode.warmup=0"]
    return [*words, "memory=0"]


def check_blocks(folder, labels):
    """A block for each group, with a baseline of its own on every question."""
    blocks = [read_rows(path) for path in sorted(folder.rglob(NAME), key=lambda path: path.stat().st_mtime_ns)]
    assert [[*header["arms"]] for header, _ in blocks] == [["none", label] for label in labels]
    for (_, rows), label in zip(blocks, labels, strict=True):
        assert {row.drafter for row in rows} == {"none", label} and len(rows) == 2 * 2 * 2
        assert all(row.audit["verdict"] == "identical" for row in rows if row.drafter == label)


def test_drafters_of_a_run_that_do_not_fit_together_decode_in_turn(home, tmp_path, monkeypatch):
    monkeypatch.setattr(loading.ModelSpec, "groups", lambda *_: [[0], [1]])
    alive, original = [], arms.build

    def build(spec, target, *rest, **more):
        gc.collect()
        names = [ref().name for ref in alive if ref() is not None]
        arm = original(spec, target, *rest, **more)
        assert "none" in (arm.label, *names) or not names, f"{names} beside {arm.label}"
        alive.append(weakref.ref(arm.bound.drafter))
        return arm

    monkeypatch.setattr(arms, "build", build)
    words, names = words_of(home, tmp_path), ("suffix", "lookahead")
    specs = [run_spec.from_config(composed("run", f"drafter={name}", *words)) for name in names]
    result = run.decode(specs, arms.Reused())
    run.require_complete(result)
    assert (result.arms, result.left, result.failed, len(result.earlier)) == (2, 0, 0, 1)
    check_blocks(tmp_path, ["suffix", "lookahead"])
    shown = measured([Asked.of(result.ledger, result.digests)])
    assert sorted(entry.name for entry in shown if entry.name != "none") == ["lookahead", "suffix"]


def study_of(home, folder, *names):
    """A study's decoder and its one cell, of arms that copy text."""
    checked = {"cells": [["dataset=mtbench"]], "arms": {name: {"run": [f"drafter={name}"]} for name in names}}
    members = list(trainings.members(checked, None, names))
    prepared = study_runs.prepare(0, ["dataset=mtbench"], members, words_of(home, folder), checked, folder)
    ran = SimpleNamespace(name="s", study=checked, overrides=["memory=0"], cells=[prepared])
    return ran, Ready("s, cell 1 of 1", prepared, prepared.base.dataset.load())


def test_a_study_decodes_its_arms_in_groups(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading.ModelSpec, "groups", lambda *_: [[0], [2]])
    ran, ready = study_of(home, tmp_path, "suffix", "token_recycling", "lookahead")
    result = _Decoder(ran, (), Budget(), lambda *_: "").decode(ready, 1.0)
    check_blocks(tmp_path, ["suffix", "lookahead"])
    printed = capsys.readouterr().err
    assert "arms 1 of 2 that fit into memory: suffix" in printed
    assert "token_recycling on mtbench: it does not fit into memory beside tiny" in printed
    trained = SimpleNamespace(failed=set(), unfinished=set())
    with pytest.raises(Exception, match="0 cells and 1 arms are missing"):
        study.require_complete(ran, [(ready.cell, result)], trained)


def test_a_study_loads_its_target_with_room_for_its_largest_group(home, tmp_path, monkeypatch):
    monkeypatch.setattr(loading.ModelSpec, "groups", lambda *_: [[0], [1, 2]])
    asked = []
    monkeypatch.setattr(
        arms, "load", lambda spec, drafters, reused: asked.append([d.name for d in drafters]) or (None, None)
    )
    ran, _ = study_of(home, tmp_path, "suffix", "token_recycling", "lookahead")
    _Decoder(ran, (), Budget(), None)
    assert asked == [["token_recycling", "lookahead"]]


def test_a_run_with_a_drafter_that_never_fits_is_refused(monkeypatch):
    monkeypatch.setattr(environment, "free_memory", lambda device, everywhere=False: GB)
    monkeypatch.setattr(loading, "pick_device", lambda device: torch.device("cpu"))
    specs = [settled(name, *RANDOM) for name in ("eagle2", "moa")]
    monkeypatch.setattr(type(specs[0].dataset), "load", lambda self: [])
    with pytest.raises(NoRoom, match="llama2-7b needs about"):
        run.decode(specs, arms.Reused())
