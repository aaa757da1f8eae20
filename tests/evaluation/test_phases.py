"""Phases timed by events in a GPU's stream, with fakes of torch's: nothing waits before the end of an answer."""

import pytest
import torch
from conftest import make, tiny
from fake_nvml import CUDA

from specbench.common import timing
from specbench.engine.decode import Limits, decode
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.evaluation import phases
from specbench.records.rows import Row

PROMPT = [3, 14, 15, 9, 26]


class Gpu:
    """Each event that is recorded lies 2 ms behind the last one; none can be read before the host has waited."""

    def __init__(self):
        self.recorded, self.waits, self.reached = 0, 0, -1

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)

    def synchronize(self, device):
        assert device == CUDA
        self.waits, self.reached = self.waits + 1, self.recorded


class Event:
    def __init__(self, gpu):
        self.gpu, self.number = gpu, None

    def record(self, stream):
        assert stream == "the stream of cuda:0" and self.number is None
        self.gpu.recorded += 1
        self.number = self.gpu.recorded

    def elapsed_time(self, end):
        assert max(self.number, end.number) <= self.gpu.reached, "read before the GPU was there"
        return 2.0 * (end.number - self.number)


@pytest.fixture
def fake(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    return gpu


def answer(clock, drafter="eagle2", count=20):
    target = tiny()
    row = Row("d", "q", "", 0, len(PROMPT), [], 0.0, 0.0)
    events = decode(target, make(drafter, target), PROMPT, Limits(count), Lossless(), Sampler(), None, clock)
    return row, phases.fill(row, events, clock)


@pytest.mark.parametrize("drafter", ["none", "eagle2"])
def test_an_answer_waits_once_and_its_phases_are_those_of_the_events(fake, drafter):
    row, lost = answer(timing.PhaseClock(CUDA), drafter)
    cycles = len(row.accepted)
    assert fake.waits == 1 and lost is None and len(row.tokens) == 20 and cycles
    # between the nine events of a cycle: three borders of drafting, two of the target, one of verification, two of the rest
    for seconds, borders in ((row.draft_s, 3), (row.target_s, 2), (row.verify_s, 1), (row.rest_s, 2)):
        assert seconds == pytest.approx(0.002 * borders * cycles)
    assert row.prefill_s == pytest.approx(0.002 * 2)  # between three events
    assert row.decode_s == pytest.approx(0.002 * (9 * cycles + 1))
    assert row.tokens == answer(timing.PhaseClock(torch.device("cpu")), drafter)[0].tokens


def test_off_a_gpu_the_clock_is_the_hosts(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("nothing to wait for"))
    row, _ = answer(timing.PhaseClock(torch.device("cpu")))
    cycles = len(row.accepted)
    assert (row.draft_s, row.target_s, row.verify_s, row.rest_s) == (3 * cycles, 2 * cycles, cycles, 2 * cycles)
    assert row.decode_s == 9 * cycles + 1 and isinstance(row.decode_s, float)


def test_times_add_up_as_numbers_do(fake):
    clock = timing.PhaseClock(CUDA)
    a, b, c = clock(), clock(), clock()
    clock.wait()
    assert float(c - a) == float((b - a) + (c - b)) == 0.004


def test_a_lost_link_is_returned_with_what_was_decoded(fake):
    clock, target = timing.PhaseClock(CUDA), tiny()
    events = decode(target, make("none", target), PROMPT, Limits(20), Lossless(), Sampler(), None, clock)

    def cut():
        for _ in range(4):
            yield next(events)
        raise phases.LinkLost("gone")

    row = Row("d", "q", "", 0, len(PROMPT), [], 0.0, 0.0)
    assert str(phases.fill(row, cut(), clock)) == "gone"
    assert len(row.tokens) == 4 and row.decode_s == pytest.approx(0.002 * (9 * 3 + 1))
    with pytest.raises(ZeroDivisionError):
        phases.fill(row, (1 // zero for zero in [0]), clock)
