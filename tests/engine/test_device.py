"""What a GPU would object to, found without one: tensors left on the CPU, and moments at which the host waits.

Everything runs on the `meta` device, which computes shapes and no values. A tensor made on the CPU by mistake then stands
out beside the others, and a value that the host wants to know cannot be had: where one is really needed the modes below
supply a 1, and note who asked. So every node of a tree is accepted, every mask is full, every loss is 1.

    read    the device must have finished before the host goes on: item, tolist, cpu, nonzero, unique, indexing by a mask
            or by a 0-d tensor
    write   what is copied from the host's own (pageable) memory waits as well: torch.tensor(…, device=…), .to(device),
            indexing by a list
"""

import traceback
from collections import Counter
from contextlib import ExitStack
from functools import cache
from itertools import chain, islice

import pytest
import torch
from conftest import DRAFTERS, ROOT, TRAINED, make, tiny
from torch import is_tensor
from torch.fx.experimental import _config as experimental
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specbench.engine.decode import Limits, decode
from specbench.engine.interface import Batch, Taps
from specbench.engine.sampling import Sampler
from specbench.engine.target import Target
from specbench.engine.verify import Lossless

META = torch.device("meta")
PROMPT = [3, 14, 15, 9, 26]
CYCLES = 2
HEADS = ("+drafter.head_rank=2",)
SAMPLERS = [Sampler(), Sampler(0.9, top_p=0.9, top_k=20)]
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)  # the ways in which devices may meet on purpose


class Waits:
    """Who made the host wait for the device, by kind and line, while `with` this."""

    def __init__(self):
        self.found: Counter[str] = Counter()
        self.modes = ExitStack()

    def __enter__(self):
        self.modes.enter_context(experimental.patch(meta_nonzero_assume_all_nonzero=True))
        self.modes.enter_context(Operators(self))
        self.modes.enter_context(Functions(self))
        return self

    def __exit__(self, *error):
        self.modes.close()

    def note(self, kind, what):
        own = [f for f in traceback.extract_stack() if f.filename.startswith((f"{ROOT}/specbench", f"{ROOT}/drafters"))]
        where = f"{own[-1].filename.removeprefix(f'{ROOT}/')}:{own[-1].lineno} {own[-1].line}" if own else "the test itself"
        self.found[f"{kind} ({what}) {where}"] += 1

    def __str__(self):
        return "\n".join(f"{count} x {line}" for line, count in sorted(self.found.items()))


class Operators(TorchDispatchMode):
    """Reads, in the operators that they become; tensors of two devices in one operator."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if made_of_others(function):  # in inference mode `int(x)` and its like arrive whole
            with self:
                return function.decompose(*args, **kwargs)
        lists = (x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *kwargs.values()))
        tensors = [x for x in chain.from_iterable(lists) if is_tensor(x)]
        on = {t.device.type for t in tensors}
        to = kwargs.get("device") or (args[0].device if function is aten.copy_.default else None)
        name = function.__name__.split(".")[0]
        if "meta" not in on:
            if to is not None and to.type == "meta" and "cpu" in on:
                self.waits.note("write", name)
            return function(*args, **kwargs)
        if function in COPIES:
            return self.copied(function, args, kwargs, to)
        # A number on the CPU goes into a kernel as its argument, like one of Python's.
        strays = [tuple(t.shape) for t in tensors if t.device.type == "cpu" and t.ndim]
        assert not strays, f"{function}: a tensor {strays} on the CPU beside the device's"
        if name in ("_local_scalar_dense", "equal", "allclose"):
            self.waits.note("read", "a value")
            return 1
        if name == "_unique2":
            self.waits.note("read", "unique")
            return args[0].flatten(), *(args[0].new_empty(0, dtype=torch.long) for _ in range(2))
        if name == "masked_select":
            self.waits.note("read", "a mask's places")
            return args[0].flatten()
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            x.dtype == torch.bool for x in args[1] if is_tensor(x)
        )
        one = name != "index" and masks and args[2].numel() == 1  # that is a masked_fill
        if (masks and not one) or name == "nonzero":
            self.waits.note("read", "a mask's places")
        return function(*args, **kwargs)

    def copied(self, function, args, kwargs, to):
        source = args[1] if function is aten.copy_.default else args[0]
        if to is None or to.type == source.device.type:
            return function(*args, **kwargs)
        if to.type == "meta":
            self.waits.note("write", "to the device")
            return function(*args, **kwargs)
        self.waits.note("read", "to the host")
        return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype) if source is args[0] else args[0]


@cache
def made_of_others(function):
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


class Functions(TorchFunctionMode):
    """Writes that meta tensors do without: numbers of Python's, put straight onto the device."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor, torch.asarray):
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "meta" and not isinstance(args[0], torch.Tensor):
                self.waits.note("write", "numbers")
        elif function is torch.Tensor.new_tensor and args[0].is_meta:
            self.waits.note("write", "numbers")
        elif function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list) for i in index):
                self.waits.note("write", "indexing by a list")
        return function(*args, **kwargs)


def on_meta(drafter, *overrides):
    """A tiny target and a drafter bound to it, without values. Loading and binding may wait as long as they like."""
    with Waits():
        target = Target(tiny().model.to(META))
        made = make(drafter, target, *overrides)
    assert {t.device for t in target.model.parameters()} == {META}
    if isinstance(made, torch.nn.Module):
        assert {t.device for t in [*made.parameters(), *made.buffers()]} == {META}
    return target, made


def cycles_of(target, made, sampler, waits):
    """Decode; how many cycles there were, whose waits alone are noted. The first cycle may prepare what later ones use."""
    target.max_context = 1 << 20
    events = decode(target, made, PROMPT, Limits(1 << 19), Lossless(), sampler)
    with Waits():
        next(events), next(events)
    with waits:
        return sum(1 for _ in islice(events, CYCLES))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_cycle_waits_for_the_device_once(drafter, sampler):
    """To read the accepted path. A router also reads which slices of the head a level needs; what copies text on the host
    reads it and writes a tree; a window that nobody accepts is read as well, found in the tree, and what is kept written.
    What goes on as long as it is confident reads that once a draft. A draft model with a window writes a tree, reads what
    is said and writes which rows stay, in two passes where all guesses are right; before them it catches up with a suffix.
    """
    target, made = on_meta(drafter)
    waits = Waits()
    cycles = cycles_of(target, made, sampler, waits)
    assert cycles == CYCLES
    levels = made.growth.depth if hasattr(made, "router") else 0
    copying = {"prompt_lookup": 2, "suffix": 2, "rest": 2, "hybrid": 2, "lookahead": 6, "ouroboros": 3 + 3 * 2 + 1}
    more = copying.get(drafter, getattr(made, "most", levels))
    assert waits.found.total() == (1 + more) * cycles, f"in {cycles} cycles\n{waits}"


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["none", "vanilla", "eagle2", "eagle3", "medusa"])
def test_captured_passes_wait_no_more_often(drafter, sampler):
    target, made = on_meta(drafter)
    target.capture()
    made.capture(target)
    waits = Waits()
    assert cycles_of(target, made, sampler, waits) == waits.found.total() == CYCLES, waits


def batch_on(device, target, packed):
    """Two rows of twelve tokens as the target saw them; packed: of two sequences each, with a confined vocabulary."""
    tokens = torch.zeros(2, 12, dtype=torch.long, device=device)
    layers = tuple(range(target.layers))
    states, hidden, kv = target.tapped(tokens, Taps(hidden=layers, kv=layers))
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    more = {}
    if packed:
        more = {"starts": torch.zeros_like(tokens), "vocabulary": torch.arange(32, device=device), "progress": 0.1}
    return Batch(tokens, states, everywhere, everywhere.clone(), hidden=hidden, kv=kv, **more)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("drafter", "overrides"),
    [*((d, ()) for d in TRAINED), ("beagle", ("+drafter.stage=late",)), ("moa", ("drafter.tli=1",)), ("medusa", HEADS)],
    ids=str,
)
def test_a_training_step_stays_on_the_device(drafter, overrides, packed):
    """Waits are allowed: a step takes long enough."""
    target, made = on_meta(drafter, *overrides)
    made.train()
    with Waits():
        metrics = made.loss(batch_on(META, target, packed))
        metrics["loss"].backward()
    assert {value.device for value in metrics.values()} == {META}
    gradients = [p.grad for p in made.parameters() if p.requires_grad]
    assert {g.device for g in gradients if g is not None} == {META}


@pytest.mark.parametrize(
    ("mistake", "kind"),
    [
        (lambda x: int(x[0, 0]), "read"),
        (lambda x: bool((x > 0).any()), "read"),
        (lambda x: x.tolist(), "read"),
        (lambda x: x.cpu(), "read"),
        (lambda x: x.unique(), "read"),
        (lambda x: x.nonzero(), "read"),
        (lambda x: x[x > 0], "read"),
        (lambda x: x.masked_select(x > 0), "read"),
        (lambda x: x.index_put((x > 0,), x.flatten()), "read"),
        (lambda x: x[x[:, 0].argmax()], "read"),
        (lambda x: torch.equal(x, x), "read"),
        (lambda x: torch.tensor([1, 2], device=META), "write"),
        (lambda x: x.new_tensor([1, 2]), "write"),
        (lambda x: x[[0, 2]], "write"),
        (lambda x: x[:, [0, 2]], "write"),
        (lambda x: torch.arange(3).to(META), "write"),
        (lambda x: x[0].copy_(torch.zeros(4)), "write"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_every_way_to_wait_is_seen(mistake, kind, inference):
    waits = Waits()
    with torch.inference_mode(inference):
        x = torch.zeros(3, 4, device=META)
        with waits:
            mistake(x)
    assert waits.found.total() == 1 and str(waits).startswith(f"1 x {kind} "), waits


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.zeros(3, 4),
        lambda x: torch.cat([x, torch.zeros(3, 4)]),
        lambda x: torch.where(torch.zeros(3, 4) > 0, x, x),
        lambda x: x[torch.arange(2)],
        lambda x: x.gather(1, torch.zeros(3, 1, dtype=torch.long)),
        lambda x: x.masked_fill(torch.zeros(3, 4) > 0, 1.0),
    ],
)
def test_a_tensor_left_on_the_cpu_is_seen(mistake):
    with pytest.raises((AssertionError, RuntimeError), match="on the CPU beside the device's"), Waits():
        mistake(torch.zeros(3, 4, device=META))


def test_what_costs_no_wait_is_none():
    waits = Waits()
    x = torch.zeros(3, 4, device=META)
    with waits:
        x[1:, 2] = 5.0
        x[x > 0] = 0.0
        x = x[x[:, 0].argmax(0, keepdim=True)] + x.new_full((1,), 3.0) + torch.arange(4, device=META)
        x.index_fill(0, torch.zeros_like(x[0], dtype=torch.long), 1.0).topk(2)
        len([1, 2]), torch.tensor([1, 2]).tolist()
    assert not waits.found, waits
