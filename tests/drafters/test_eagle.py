"""EAGLE's ablations: one stream without a fully connected layer; tokens without regression."""

import pytest
import torch
from conftest import composed, make, tiny
from decoding import PROMPT, generate, plain
from drafting import batch_of, optimise
from transformers import LlamaConfig

from drafters.eagle import Eagle
from specbench.common.errors import SpecBenchError
from specbench.engine.memory import Shape
from specbench.engine.policies import Chain
from specbench.engine.weights import trained
from specbench.records.studies import FOLDER, read
from specbench.training.corpus_reader import HeldOutAnswer
from specbench.training.replay import chains, replay


@pytest.mark.parametrize("inputs", ["feature", "token"])
def test_one_stream_enters_the_layer_as_it_is(inputs):
    target = tiny()
    made = make(f"eagle2_{inputs}", target)
    batch = batch_of(target, rows=2, length=8)
    streams = {"feature": batch.states, "token": made.embedding(batch.tokens)}
    seen = []
    made.layer.register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[0]))
    made.network(batch.states, batch.tokens, batch.positions, None, None)
    assert torch.equal(seen[0], streams[inputs])
    assert not any(name.startswith("fc.") for name in trained(made))
    before = make(f"eagle2_{inputs}", target, "drafter.fc=true")  # as arms and weights had it that name no `fc`
    assert {n: t.shape for n, t in trained(before).items() if n.startswith("fc.")} == {
        "fc.weight": (32, 32),
        "fc.bias": (32,),
    }


@pytest.mark.parametrize("inputs", ["shifted", "unshifted"])
def test_two_streams_need_a_fully_connected_layer(inputs):
    with pytest.raises(SpecBenchError, match=f"drafter.inputs={inputs} has two streams"):
        make("eagle2", tiny(), f"+drafter.inputs={inputs}", "+drafter.fc=false")


def test_tokens_alone_are_trained_without_regression():
    target = tiny()
    made, batch = make("eagle2_token", target), batch_of(target, rows=2, length=8)
    metrics = made.loss(batch)
    assert float(metrics["loss"].detach()) == pytest.approx(
        made.classification * float(metrics["classification"]), rel=1e-5
    )
    assert float(metrics["regression"]) > 0


@pytest.mark.parametrize("options", [["layers=2", "intermediate_size=20"], ["intermediate_size=96"], ["layers=3"]])
def test_a_deeper_or_wider_head_drafts_what_it_is_trained_to_draft(options):
    target = tiny()
    made = make("eagle2", target, *(f"+drafter.{option}" for option in options))
    truth = plain(target, PROMPT, 30)
    optimise(made, batch_of(target), 20)
    assert generate(target, made, cap=30)[0] == truth
    made.set_tree_policy(Chain(3))
    answers = [HeldOutAnswer(PROMPT + truth, len(PROMPT))]
    found = chains(target, made, answers, 3)
    assert found == replay(target, made, answers) and sum(found.passed) > 2
    assert (Eagle.export_obstacle("sglang", vars(made)) is None) == (made.layers == 1)


def test_a_deeper_head_of_as_many_parameters_and_a_wider_one():
    """As arms of `moa_table5` have them, on the default target's shape."""
    shape = Shape(LlamaConfig(vocab_size=99, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
                              num_key_value_heads=3, num_hidden_layers=2), torch.float32)  # fmt: skip
    arms = read(FOLDER / "moa_table5.yaml")["arms"]

    def size(arm):
        options = composed("run", "model=smollm2-135m", *arms[arm]["run"]).drafter
        sizes = {name: options[name] for name in ("layers", "intermediate_size") if name in options}
        return Eagle("eagle2", Chain(4), **sizes).outline(shape).own

    assert size("eagle_deep") == pytest.approx(size("eagle"), rel=1e-3)
    assert size("eagle_wide") == pytest.approx(1.6 * size("eagle"), rel=0.01)
