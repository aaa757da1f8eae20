"""How functions are recorded, with stand-ins for CUDA's streams and graphs; `test_gpu` has the real ones."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from specbench.common.errors import SpecBenchError
from specbench.engine.backends import cuda_graphs
from specbench.engine.backends.cuda_graphs import Graphs

CPU = torch.device("cpu")


class Stream:
    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class Graph:
    replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch):
    """Graphs on a CPU that believes to be a GPU. current: its stream; recorded: (pool, stream) of every recording."""
    made = Graphs(CPU)
    made.stream, made.pool, made.current, made.recorded = Stream(), object(), Stream(), []

    @contextmanager
    def recording(graph, pool, stream):
        made.recorded.append((pool, stream))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    return made


def test_a_function_is_warmed_up_recorded_once_and_then_replayed(graphs):
    seen = []

    def function(x):
        seen.append(x.clone())
        return (x + 1,)

    one = graphs.get("one", function, lambda: [torch.zeros(3)])
    one.prepare(torch.tensor([5.0]))
    assert len(seen) == cuda_graphs.WARM_UP + 1 and all(x.tolist() == [5, 0, 0] for x in seen)
    assert graphs.recorded == [(graphs.pool, graphs.stream)] and one.graph.replays == 0
    assert graphs.stream.waited_for == [graphs.current] and graphs.current.waited_for == [graphs.stream]
    (found,) = one(torch.tensor([1.0, 2.0, 3.0]))
    assert found is one.outputs[0] and one.buffers[0].tolist() == [1, 2, 3]
    assert len(seen) == cuda_graphs.WARM_UP + 1 and one.graph.replays == 1 == len(graphs.recorded)


def test_what_cannot_be_recorded_is_one_line(graphs):
    calls = []

    def function(x):
        calls.append(1)
        if len(calls) > cuda_graphs.WARM_UP:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return (x,)

    one = graphs.get("one", function, lambda: [torch.zeros(1)])
    with pytest.raises(SpecBenchError, match=r"cannot be captured \(operation not permitted .*use backend=eager") as error:
        one(torch.zeros(1))
    assert "\n" not in str(error.value) and one.graph is None


def test_memory_that_is_missing_is_no_reason_to_decode_eagerly(graphs):
    def function(x):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.get("one", function, lambda: [torch.zeros(1)])(torch.zeros(1))
