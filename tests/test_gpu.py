"""What only a GPU can show; skipped where none is, because there is nothing to look at.

`test_device` checks on `meta` that no tensor stays on the CPU and that a cycle waits for the device once. Nothing records
a run of the tests below; the first one has to show:

    kernels     attention with masks and grouped heads gives the baseline's ids in float32, by Transformers' forward and by
                the fused one that `make bench` takes, alone and in batches; sampling runs in bfloat16; cuDNN's attention
                is off, whatever length comes
    driver      it says what headers and rows hold of it, or that it does not
    memory      a peak that is measured in this process does not count other drafters
    waits       the profiler counts what `test_device` counts
    graphs      captured passes say what eager ones say, though every replay overwrites the last one's outputs, and cached
                rows that a drafter taps are views of what the next pass writes; a cycle launches one graph for its pass,
                one for a tree of fixed shape
    writing     dialogues written many at a time are those written on the CPU
    training    half precision: finite gradients; that no loss scale is needed

and beyond these tests, by hand on one machine or two GPUs:

    clock       draft, target, verification and rest of a row add up to its decode time (`timing.PhaseClock`), which a clock
                that waits (`timing.Clock`) confirms
    memory      the driver's number against nvidia-smi; an allocation too large is one failed row, and the next one runs
    halves      real targets in bfloat16 differ from the baseline at numerical ties only (the table says so)
    several     model.device_map=auto over two GPUs; train.shard_target over NCCL; two processes train what one does
    speed-up    the papers' settings (`make bench MODEL=…`), which a CPU says nothing about
"""

import pytest
import torch
from conftest import BATCHED, DRAFTING, TRAINED, make, tiny
from corpora import prompts_of
from drafting import batch_of

from specbench.common import environment, gpu, timing
from specbench.common.errors import SpecBenchError
from specbench.engine import attention, cache
from specbench.engine.batch import decode_together
from specbench.engine.decode import Limits, Prefill, decode
from specbench.engine.loading import ModelSpec
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless
from specbench.evaluation import isolated, phases
from specbench.evaluation.runner import BoundDrafter
from specbench.records.rows import Row
from specbench.training.answer_writer import Lengths, write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PROMPT = [3, 4, 5, 6]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


DEVICE = torch.device("cuda", 0)


def on_gpu(dtype=torch.float32, fused=False) -> Target:
    attention.prepare(DEVICE)
    target = Target(tiny().model.to(DEVICE, dtype))
    if fused:
        target.optimize_for_inference()
        assert target.kernels == "fused"
    return target


def fast(drafter, target):
    """A drafter as `make bench` has it."""
    made = make(drafter, target)
    made.optimize_for_inference()
    return made


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
def test_the_fused_forward_gives_the_ids_of_transformers_own(drafter):
    expected, target = ids(events(on_gpu(), make("none", on_gpu()))), on_gpu(fused=True)
    assert ids(events(target, fast("none", target))) == expected
    assert ids(events(target, fast(drafter, target))) == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("drafter", BATCHED)
def test_a_batch_gives_the_ids_of_its_sequences_alone(drafter, fused):
    target = on_gpu(fused=fused)
    made, prompts = fast(drafter, target), [PROMPT, [*PROMPT, 9, 8], PROMPT[:2]]
    found = decode_together(target, made, prompts, Limits(24), Lossless(), Sampler(), [None] * 3)
    plain = make("none", target)
    for prompt, one in zip(prompts, found.events, strict=True):
        assert ids(one) == ids(decode(target, plain, prompt, Limits(24), Lossless(), Sampler()))


def test_a_quantised_target_is_refused_before_it_is_loaded(home):
    spec = ModelSpec("tiny", path=str(home / "model"), device="cuda", quantised="int8")
    with pytest.raises(SpecBenchError, match="is for CPUs"):
        spec.load()


def test_cudnn_makes_no_plans_for_attention():
    """A plan takes tens of milliseconds; a hundred new lengths would take seconds."""
    target = on_gpu(torch.bfloat16, fused=True)
    assert "cudnn" not in target.attention.values() and not torch.backends.cuda.cudnn_sdp_enabled()
    made, clock = make("none", target), timing.Clock(DEVICE)
    events(target, made)  # warm
    begin = clock()
    found = events(target, made, count=100)
    assert len(ids(found)) == 100 and (clock() - begin) / 100 < 0.02


@pytest.mark.parametrize("drafter", ["none", "eagle2", "suffix"])
def test_events_say_what_a_clock_that_waits_says(drafter):
    """Of a whole answer, from its first cycle on: the same work within a tenth, though nothing waits between phases."""
    target = on_gpu(fused=True)
    made, seconds = fast(drafter, target), {}
    for clock in (timing.PhaseClock(DEVICE), timing.Clock(DEVICE)) * 2:  # the first round warms up
        row = Row("d", "q", "", 0, len(PROMPT), [], 0.0, 0.0)
        waiting = timing.Clock(DEVICE)
        begin = waiting()
        for event in (found := decode(target, made, PROMPT, Limits(100), Lossless(), Sampler(), None, clock)):
            if isinstance(event, Prefill):
                row.tokens.append(event.token)
                break
        if isinstance(clock, timing.PhaseClock):
            phases.fill(row, found, clock)
            parts = row.draft_s + row.target_s + row.verify_s + row.rest_s
            assert 0.98 * row.decode_s < parts <= row.decode_s
            assert row.decode_s < waiting() - begin
        else:
            list(found)
        seconds[type(clock)] = waiting() - begin
    assert seconds[timing.PhaseClock] < 1.1 * seconds[timing.Clock]


def test_the_driver_describes_the_gpu():
    described, now = gpu.description(DEVICE), gpu.state(DEVICE)
    assert gpu.visible() is not None and described["driver"] != gpu.UNKNOWN
    assert 1 < described["memory_gib"] < 1000 and 10 < described["power_limit_w"] < 10_000
    assert now.sm_mhz is None or now.sm_mhz > 0
    meter = gpu.Meter(DEVICE)
    meter.start()
    events(on_gpu(), make("none", on_gpu()))
    assert meter.read().energy_j is None or meter.read().energy_j >= 0
    assert environment.hardware(DEVICE)["gpu"]["cuda"] == torch.version.cuda


@pytest.mark.parametrize("drafter", ["none", "eagle2"])
def test_a_peak_measured_beside_other_drafters_does_not_count_them(drafter):
    target = on_gpu()
    bound = BoundDrafter(drafter, make(drafter, target), Lossless())
    alone = isolated.memory_on_gpu(target, bound, PROMPT, 16)
    other = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    again = isolated.memory_on_gpu(target, bound, PROMPT, 16)
    assert other.numel() and abs(again["peak"] - alone["peak"]) < 1 << 20
    assert alone["loaded"] < alone["peak"] <= alone["reserved"] and alone["device"] >= alone["reserved"]
    assert alone.get("driver", alone["device"]) >= alone["reserved"]


@pytest.mark.parametrize("drafter", DRAFTING)
def test_sampling_runs_on_a_gpu(drafter):
    target = on_gpu(torch.bfloat16)
    assert len(ids(events(target, make(drafter, target), Sampler(1.0)))) == 32


@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cycle_waits_for_the_device_once(drafter, temperature):
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
    more = 5 if drafter in DRAFTING and drafter not in TRAINED else 0
    more += 3 * made.passes if drafter == "ouroboros" else 0
    more = made.growth.depth if hasattr(made, "router") else getattr(made, "most", more)
    assert waits <= (1 + more) * (len(found) - 1) + 6, waits  # the prefill and the end have a few of their own


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("drafter", ["none", *DRAFTING])
def test_captured_passes_say_what_eager_ones_do_on_a_gpu(drafter, fused, monkeypatch):
    monkeypatch.setattr(cache, "BUCKET", 16)  # an answer outgrows its first capacities
    target = on_gpu(fused=fused)
    expected = ids(events(target, fast(drafter, target)))
    target.capture()
    made = make(drafter, target)
    made.capture(target)
    made.optimize_for_inference()
    assert ids(events(target, made)) == expected
    assert ids(events(target, made)) == expected, "replayed from the first cycle on"
    growth = getattr(made, "captured", None)
    for graphs in [target.captured.graphs] + ([] if growth is None else [growth.graphs]):
        assert graphs.captured and all(one.graph is not None for one in graphs.captured.values())


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3"])
def test_other_architectures_are_captured_on_a_gpu(architecture):
    target = Target(tiny(architecture).model.to(DEVICE))
    made = make("eagle2", target)
    expected = ids(events(target, made))
    target.capture()
    assert ids(events(target, made)) == expected


@pytest.mark.parametrize(("drafter", "graphs"), [("none", 1), ("eagle2", 3)])
def test_a_captured_cycle_launches_a_graph_for_its_tree_its_pass_and_what_it_keeps(drafter, graphs):
    target = on_gpu(torch.bfloat16, fused=True)
    target.capture()
    made = make(drafter, target)
    made.capture(target)
    made.optimize_for_inference()
    events(target, made)  # captures
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        cycles = len(events(target, made)) - 1
    assert sum(e.count for e in p.key_averages() if e.key == "cudaGraphLaunch") == graphs * cycles


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
