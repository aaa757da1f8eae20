"""backend=compile, which is for GPUs: static shapes say the same as eager, and no pass is compiled twice."""

import pytest
import torch
from battery import refuse
from conftest import make, tiny

from specbench import run
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.sampling import Sampler
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
        *(("llama", d) for d in ("none", "eagle2", "medusa", "moa")),
        ("mistral", "none"),
        ("gemma3", "eagle2"),
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


def test_a_cpu_decodes_eagerly(tmp_path):
    """Before a target is looked for: compiled passes take longer there. What a GPU makes of them is in `test_gpu`."""
    arguments = ["drafter=eagle2", "backend=compile", "model.device=cpu", f"results={tmp_path}"]
    assert refuse(run, "run", arguments, "backend=compile", [tmp_path]) is None
