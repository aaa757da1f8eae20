"""Functions of fixed shapes, recorded once as CUDA graphs and replayed: one launch instead of one for every kernel.

A graph reads and writes the memory that it was recorded with. So a function has *buffers* for its inputs, into which each
call copies, and for its outputs, which the next call overwrites. All other memory of a device's graphs is one pool: what
one of them computes on the way may be overwritten by any other. Outputs lie outside the pool, so the order in which
graphs are replayed does not matter, as long as no two run at once.

Off CUDA the same function runs on the same buffers, unrecorded: copying, padding and reuse of buffers show there, too.

Source: PyTorch's documentation of `torch.cuda.CUDAGraph` and its notes on the memory of graphs.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from specbench.common.errors import SpecBenchError, one_line

WARM_UP = 3  # runs before recording: kernels are loaded and workspaces allocated in the first ones

Function = Callable[..., Sequence[Tensor]]


class Captured:
    """A function in fixed shapes.

    Args:
        function: of tensors. It may not read a value back to the host. Recording runs it several times with the same
            inputs: where that leaves another state than one run does, `prepare` it first with inputs for which it does not.
        inputs: what its buffers hold where a call gives less.
        graphs: whose device and memory it uses.
    """

    def __init__(self, function: Function, inputs: Sequence[Tensor], graphs: "Graphs"):
        self.function, self.graphs = function, graphs
        self.padding = [x.clone() for x in inputs]
        self.buffers = [x.clone() for x in inputs]
        self.shapes = [x.shape for x in inputs]  # of the last call's inputs
        self.outputs: tuple[Tensor, ...] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs for these inputs, each as large as its buffer or smaller in some axes; valid until the next call."""
        self.prepare(*inputs)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        assert self.outputs is not None
        return self.outputs

    @torch.inference_mode()
    def prepare(self, *inputs: Tensor) -> None:
        """Copy inputs into the buffers and, on CUDA, record the function with them unless that is done."""
        self._fill(*inputs)
        if self.graph is None and self.graphs.stream is not None:
            self._record(self.graphs.stream)

    def _fill(self, *inputs: Tensor) -> None:
        """Copy inputs into the buffers, and padding where the last call's inputs were larger."""
        for i, (buffer, x) in enumerate(zip(self.buffers, inputs, strict=True)):
            if x.shape != self.shapes[i]:
                buffer.copy_(self.padding[i])
                self.shapes[i] = x.shape
            buffer[tuple(slice(size) for size in x.shape)].copy_(x)

    def _record(self, stream: torch.cuda.Stream) -> None:
        """Record the function as a graph. Raises `SpecBenchError` for one that cannot be recorded."""
        current = torch.cuda.current_stream(self.graphs.device)
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    found = self.function(*self.buffers)
            current.wait_stream(stream)
            self.outputs = _like(found)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(current), torch.cuda.graph(graph, pool=self.graphs.pool, stream=stream):
                self._run()  # the outer context restores the stream even where recording fails
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise SpecBenchError(
                f"backend=graphs: a pass cannot be captured ({one_line(error)}); use backend=eager"
            ) from error
        self.graph = graph

    def _run(self) -> None:
        found = self.function(*self.buffers)
        if self.outputs is None:
            self.outputs = _like(found)
        for buffer, x in zip(self.outputs, found, strict=True):
            buffer.copy_(x)


def _like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


class Graphs:
    """The captured functions of one device, by key: what they are, and all sizes on which their shapes depend."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.clear()

    def get(self, key: Hashable, function: Function, inputs: Callable[[], Sequence[Tensor]]) -> Captured:
        """The function captured under a key; made of these if there is none. inputs: see `Captured`."""
        if key not in self.captured:
            self.captured[key] = Captured(function, inputs(), self)
        return self.captured[key]

    def clear(self) -> None:
        """Forget all functions: memory that they read or write is gone.

        What they computed may still be alive in the pool, which must not be recorded into again while no graph uses it.
        """
        self.captured: dict[Hashable, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.stream is not None else None
