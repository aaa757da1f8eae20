"""Wide products in bfloat16 where that pays: weights and sums stay in float32, the target's states stay its own."""

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import make, tiny
from corpora import trainer
from drafting import batch_of

from specbench.data.corpus_file import Dialogue
from specbench.training import precision
from specbench.training.corpus_reader import CorpusReader
from specbench.training.shards import read, save_shard

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[True, False])
def pays(request, monkeypatch):
    monkeypatch.setattr(precision, "bfloat16_pays", lambda width: request.param)
    return request.param


def test_auto_is_bfloat16_on_a_gpu_and_where_it_pays(pays):
    assert precision.mixed("auto", GPU, 576) == "bf16"
    assert precision.mixed("auto", CPU, 576) == ("bf16" if pays else "no")
    assert [precision.mixed(name, CPU, 576) for name in ("no", "bf16", "fp16")] == ["no", "bf16", "fp16"]


def test_narrow_products_never_pay_and_wide_ones_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda tokens, weight: tried.append(tokens.dtype))
    precision.bfloat16_pays.cache_clear()
    assert not precision.bfloat16_pays(precision.NARROW - 1) and not tried
    precision.bfloat16_pays(precision.NARROW)
    precision.bfloat16_pays(precision.NARROW)
    assert tried == [torch.float32] * 4 + [torch.bfloat16] * 4
    precision.bfloat16_pays.cache_clear()


@pytest.fixture
def _a_process_of_its_own():
    """Accelerate settles on one precision a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("_a_process_of_its_own")
def test_a_training_in_bfloat16_keeps_its_weights_in_float32(tmp_path, pays):
    made = trainer(tmp_path, precision="auto", steps=2)
    assert made.accelerator.mixed_precision == ("bf16" if pays else "no")
    made.run()
    assert all(p.dtype == torch.float32 for p in made.parameters)


def test_states_are_read_in_float32_unless_that_is_slower(pays):
    target = tiny(spread=0.15)
    texts = [Dialogue(0, list(range(2, 40)), [(10, 38)])]
    readings = ("target", precision.settled_reading("auto", None, CPU, target.hidden_size))
    exact, asked = (read(target, texts, True, reading)[0].states for reading in readings)
    assert exact is not None and asked is not None
    assert torch.equal(exact, asked) is not pays
    assert (exact.float() - asked.float()).norm() < 0.03 * exact.float().norm()


LOSSES = ["eagle2", "hass", "eagle3", "coral", "medusa", "beagle", "beagle +drafter.stage=late", "vanilla", "moa"]


@pytest.mark.parametrize("drafter", LOSSES)
def test_every_loss_is_nearly_the_same_in_bfloat16(drafter):
    target, (name, *options) = tiny(), drafter.split()
    made, batch = make(name, target, *options), batch_of(target)
    torch.manual_seed(0)
    whole = made.loss(batch)["loss"]
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        half = made.loss(batch)["loss"]
    half.backward()
    assert half.dtype == torch.float32 and float(half.detach()) == pytest.approx(float(whole.detach()), rel=0.05)
    assert all(torch.isfinite(p.grad).all() for p in made.parameters() if p.grad is not None)


def test_tapped_layers_come_in_the_targets_own_precision(tmp_path, pays):
    target = tiny(spread=0.15)
    made = make("moa", target)
    save_shard(tmp_path / "shard-00000.safetensors", read(target, [Dialogue(0, list(range(2, 40)), [(10, 38)])], False))
    corpus = CorpusReader(tmp_path, 1, False, 0, target, made.taps, reading="bfloat16")
    batch = corpus.load(corpus.batches(0)[0], CPU, torch.float32)
    assert {t.dtype for pair in batch.kv.values() for t in pair} | {batch.states.dtype} == {torch.float32}
    assert torch.isfinite(made.loss(batch)["loss"])
