"""What a study holds in memory: one target, the arms of one cell, and no checkpoint once its drafter is bound."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import composed, configuration, make, tiny
from hydra.utils import instantiate
from safetensors.torch import save_file

from specbench.common.budget import Budget
from specbench.common.errors import SpecBenchError
from specbench.config import run_spec
from specbench.engine import checkpoints
from specbench.engine.memory import NoRoom, Shape
from specbench.evaluation import arms, run, study
from specbench.evaluation.study import Ready, _Decoder


def test_a_cells_result_keeps_neither_target_nor_drafters(home, tmp_path, monkeypatch):
    seen = []
    original = arms.build

    def build(spec, target, *rest, **more):
        arm = original(spec, target, *rest, **more)
        seen.extend((weakref.ref(target), weakref.ref(arm.bound.drafter)))
        return arm

    monkeypatch.setattr(arms, "build", build)
    words = [f"model.path={home / 'model'}", "model.name=tiny", "model.wheel=null", f"results={tmp_path}", "threads=1"]
    words += ["drafter=suffix", "data.limit=1", "decode.max_new_tokens=4", "decode.warmup=0", "memory=0"]
    words += [f"data.root={home}"]
    result = run.decode([run_spec.from_config(composed("run", *words))], arms.Reused())
    gc.collect()
    assert len(seen) == 4 and [ref() for ref in seen] == [None] * 4
    assert isinstance(result.text([5, 6]), str) and result.left == 0


def cell_of(model, number=0):
    base = SimpleNamespace(model=model, link=None, backend="eager", batch=1, cell_folder=f"cell-{number}")
    return SimpleNamespace(base=base, arms=[], number=number, title=model)


class Loads:
    """Stands for `arms.load`; each target is a new object, `full` models do not fit."""

    def __init__(self):
        self.full, self.alive, self.order, self.together = set(), [], [], 0

    def __call__(self, spec, drafters, reused):
        self.order.append(spec.model)
        gc.collect()
        self.together = max(self.together, 1 + sum(ref() is not None for ref in self.alive))
        if spec.model in self.full:
            raise NoRoom(f"{spec.model} needs more memory")
        target = tiny()
        self.alive.append(weakref.ref(target))
        return target, None


@pytest.fixture
def loads(monkeypatch):
    found = Loads()
    monkeypatch.setattr(arms, "load", found)
    monkeypatch.setattr(_Decoder, "_decode", lambda self, ready, work: (ready.title, self.target is not None))
    return found


def decoded(models):
    cells = [cell_of(model, n) for n, model in enumerate(models)]
    decoder = _Decoder(SimpleNamespace(cells=cells), (), Budget(), None)
    return [decoder.decode(Ready(f"{n}", one, ()), 1.0) for n, one in enumerate(cells)]


def test_a_target_is_freed_before_the_next_is_loaded(loads):
    assert decoded(["half", "whole", "half", "half"]) == [(str(n), True) for n in range(4)]
    assert loads.order == ["half", "whole", "half"] and loads.together == 1


def test_a_target_that_does_not_fit_costs_its_cells_alone(loads, capsys):
    loads.full = {"whole"}
    assert decoded(["half", "whole", "whole", "half"]) == [("0", True), None, None, ("3", True)]
    assert loads.order == ["half", "whole", "whole", "half"], "a cell with smaller drafters may fit"
    assert capsys.readouterr().err.count("1: whole needs more memory") == 1
    with pytest.raises(SpecBenchError, match="whole needs more memory"):
        decoded(["whole"])


def test_cells_without_a_target_are_missing_in_the_end(loads, monkeypatch):
    loads.full = {"whole"}
    cells = [cell_of("half"), cell_of("whole", 1)]
    for one in cells:
        one.work, one.expected = lambda _: 1, 0
    monkeypatch.setattr(study, "_ready", lambda _: [Ready(str(n), one, ()) for n, one in enumerate(cells)])
    result = SimpleNamespace(failed=0, unmeasured=0, arms=0, ledger=Ledger)
    result.parts = (result,)
    monkeypatch.setattr(_Decoder, "_decode", lambda *_: result)
    monkeypatch.setattr(arms, "require_lossless", lambda path: None)
    trained = SimpleNamespace(failed=set(), unfinished=set())
    ran = SimpleNamespace(name="s", cells=cells)
    found = study.decode(ran, trained, Budget(), None)
    assert [one.number for one, _ in found] == [0]
    with pytest.raises(SpecBenchError, match="1 cells and 0 arms are missing"):
        study.require_complete(ran, found, trained)


class Ledger:
    block = SimpleNamespace(path=None)


def test_a_bound_drafter_holds_no_checkpoint(tmp_path):
    target = tiny()
    trained = make("eagle2", target)
    tensors, _ = trained.export_tensors("sglang", target)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    checkpoint = checkpoints.read(str(tmp_path))
    assert "tensors" not in vars(checkpoint), "planned drafters of all cells would hold them"
    made = instantiate(configuration("eagle2", "drafter.weights=null").drafter)
    made.checkpoint = checkpoint
    made.outline(Shape(target.config, torch.float32))
    assert "tensors" not in vars(checkpoint)
    copied = copy.deepcopy(made)
    copied.bind(target)
    assert "tensors" not in vars(checkpoint)
    for name, own in copied.state_dict().items():
        assert torch.equal(own, trained.state_dict()[name]), name
    again = copy.deepcopy(made)
    again.bind(target)
    assert torch.equal(again.fc.weight, copied.fc.weight), "it is read again"
