"""backend=compile: static shapes say the same as eager, and no pass is compiled twice."""

import pytest
import torch
from conftest import make, tiny

from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless

PROMPTS = ([3, 4, 5], [7] * 21, [9, 8])


def ids(target, drafter):
    found = []
    for prompt in PROMPTS:
        found.append([])
        for event in decode(target, drafter, prompt, Limits(24), Lossless(), Sampler()):
            found[-1] += [event.token] if isinstance(event, Prefill) else event.tokens
    return found


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("drafter", ["none", "eagle2", "vanilla", "medusa", "coral_router", "beagle", "moa"])
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
    eager, compiled = tiny(), tiny()
    expected = ids(eager, make("eagle2", eager))
    torch._dynamo.reset()
    made = make("eagle2", compiled)
    compiled.compile()
    made.compile_network()
    assert ids(compiled, made) == expected
