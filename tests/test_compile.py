"""backend=compile: static shapes say the same as eager, and no pass is compiled twice."""

import pytest
import torch
from conftest import SIZES, make, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless

PROMPTS = ([3, 4, 5], [7] * 21, [9, 8])


def ids(target, drafter, prompts=PROMPTS):
    found = []
    for prompt in prompts:
        found.append([])
        for event in decode(target, drafter, prompt, Limits(24), Lossless(), Sampler()):
            found[-1] += [event.token] if isinstance(event, Prefill) else event.tokens
    return found


# A drafter's network is Llama's whatever the target: only its trees and taps meet the passes of other architectures.
@pytest.mark.parametrize(
    ("architecture", "drafter"),
    [
        *(("llama", d) for d in ("none", "eagle2", "vanilla", "medusa", "coral_router", "beagle", "moa")),
        *(("mistral", d) for d in ("none", "eagle2")),
        *(("gemma3", d) for d in ("none", "eagle2", "moa")),
    ],
)
def test_compiled_passes_say_what_eager_ones_do(architecture, drafter):
    eager = tiny(architecture)
    expected = ids(eager, make(drafter, eager))
    compiled = tiny(architecture)
    made = make(drafter, compiled)
    passes = []

    def counting(graph, inputs):
        passes.append(graph)
        return graph

    torch._dynamo.reset()
    compiled.compile(backend=counting)
    if drafter != "none":
        made.compile_network(backend="eager")
    assert ids(compiled, made) == expected
    assert len(passes) == 1, "one shape, one compilation, whatever the prompt"


def test_the_real_backend_on_this_machine():
    """One layer and a small tree: the C++ compiler takes seconds for each shape that Inductor sees."""
    small = "tree.depth=2", "tree.top_k=2", "tree.nodes=4"
    eager, compiled = (Target(LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))) for _ in range(2))
    compiled.model.load_state_dict(eager.model.state_dict())
    expected = ids(eager, make("eagle2", eager, *small), PROMPTS[:1])
    torch._dynamo.reset()
    made = make("eagle2", compiled, *small)
    compiled.compile()
    made.compile_network()
    assert ids(compiled, made, PROMPTS[:1]) == expected
