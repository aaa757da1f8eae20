"""What only a GPU can show; skipped where none is, because there is nothing to look at.

`test_device` checks on `meta` that no tensor stays on the CPU and that a cycle waits for the device twice. Nothing records
a run of the tests below; the first one has to show:

    kernels     attention with boolean masks and grouped heads gives the baseline's ids in float32; sampling runs in
                bfloat16
    waits       the profiler counts what `test_device` counts
    compiled    CUDA graphs (`reduce-overhead`) say what eager passes say, though every replay overwrites the last one's
                outputs, and cached rows that a drafter taps are views of what the next pass writes
    writing     dialogues written many at a time are those written on the CPU
    training    half precision: finite gradients; that no loss scale is needed

and beyond these tests, by hand on one machine or two GPUs:

    clock       draft, target, verification and rest of a row add up to its decode time (`timing.Clock` synchronises)
    memory      `timing.PeakMemory` against nvidia-smi; an allocation too large is one failed row, and the next one runs
    halves      real targets in bfloat16 differ from the baseline at numerical ties only (the table says so)
    several     model.device_map=auto over two GPUs; train.shard_target over NCCL; two processes train what one does
    speed-up    the papers' settings (`make bench MODEL=…`), which a CPU says nothing about
"""

import pytest
import torch
from conftest import DRAFTING, TRAINED, make, tiny
from corpora import prompts_of
from drafting import batch_of

from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless
from specbench.training.writer import Lengths, write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PROMPT = [3, 4, 5, 6]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def on_gpu(dtype=torch.float32) -> Target:
    return Target(tiny().model.to("cuda", dtype))


def events(target, drafter, sampler=None, count=32):
    sampler = sampler or Sampler()
    generator = None if sampler.greedy else torch.Generator("cuda").manual_seed(0)
    return list(decode(target, drafter, PROMPT, Limits(count), Lossless(), sampler, generator))


def ids(found):
    return [i for e in found for i in ([e.token] if isinstance(e, Prefill) else e.tokens)]


@pytest.mark.parametrize("drafter", DRAFTING)
def test_greedy_ids_are_the_baselines_on_a_gpu(drafter):
    target = on_gpu()
    assert ids(events(target, make(drafter, target))) == ids(events(target, make("none", target)))


@pytest.mark.parametrize("drafter", DRAFTING)
def test_sampling_runs_on_a_gpu(drafter):
    target = on_gpu(torch.bfloat16)
    assert len(ids(events(target, make(drafter, target), Sampler(1.0)))) == 32


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cycle_waits_for_the_device_twice_at_most(drafter, temperature):
    """A router once more at each level, for its groups; what copies on the host as often as `test_device` says."""
    target = on_gpu()
    made = make(drafter, target)
    events(target, made, Sampler(temperature))  # warm
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as p:
        found = events(target, made, Sampler(temperature))
        torch.cuda.synchronize()
    waits = sum(e.count for e in p.key_averages() if e.key in WAITS)
    more = 4 if drafter in DRAFTING and drafter not in TRAINED else 0
    more += 3 * made.passes if drafter == "ouroboros" else 0
    more = made.growth.depth if hasattr(made, "router") else getattr(made, "most", more)
    assert waits <= (2 + more) * (len(found) - 1) + 6, waits  # the prefill and the end have a few of their own


@pytest.mark.parametrize("drafter", ["none", "eagle2", "beagle"])
def test_compiled_passes_say_what_eager_ones_do_on_a_gpu(drafter):
    target = on_gpu()
    expected = ids(events(target, make(drafter, target)))
    made = make(drafter, target)
    torch._dynamo.reset()
    target.compile()
    if drafter != "none":
        made.compile_network()
    assert ids(events(target, made)) == expected


def test_dialogues_are_written_on_a_gpu():
    lengths, prompts = Lengths(answer=9, whole=30, min_answer=4), prompts_of(12)
    by_cpu = {d.index: d.tokens for d in write(tiny(), iter(prompts), lengths, 5)}
    assert {d.index: d.tokens for d in write(on_gpu(), iter(prompts), lengths, 5)} == by_cpu


@pytest.mark.parametrize("drafter", TRAINED)
def test_a_step_in_half_precision_trains_on_a_gpu(drafter):
    """As the trainer takes it: weights in float32, products in bfloat16, the target in bfloat16."""
    target = on_gpu(torch.bfloat16)
    made, batch = make(drafter, target), batch_of(on_gpu(torch.bfloat16))
    own = [p for p in made.parameters() if p.requires_grad]
    for parameter in own:
        parameter.data = parameter.data.float()
    with torch.autocast("cuda", torch.bfloat16):
        loss = made.loss(batch)["loss"]
    loss.backward()
    gradients = [p.grad for p in own if p.grad is not None]
    assert gradients and all(g.isfinite().all() for g in gradients) and any(g.abs().sum() > 0 for g in gradients)
