"""EAGLE's ablations: one stream without a fully connected layer; tokens without regression."""

import pytest
import torch
from conftest import make, tiny
from drafting import batch_of

from specbench.common.errors import SpecBenchError
from specbench.engine.weights import trained


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
