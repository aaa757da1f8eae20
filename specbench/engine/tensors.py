"""Files of tensors that others wrote: safetensors, or pickles that hold nothing but tensors. Knows no models."""

import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specbench.common.errors import SpecBenchError, one_line, refusing

CODE = re.compile(r"GLOBAL|Unsupported (global|class|operand 149)|instantiate")  # in torch's message on a pickle with code


def dtype_name(dtype: Any) -> str:
    """`float32` of `torch.float32`, as options, headers and messages name it."""
    return str(dtype).removeprefix("torch.")


def unpickled(path: Path, hint: str = "fetch it again") -> Any:
    """What torch saved in a file: tensors and plain values, never code. Raises `SpecBenchError`, with the hint."""
    with refusing(f"{path} is damaged or cut off; {hint}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters becomes an error below
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if not CODE.search(one_line(error)):  # torch's message advises to load the code
                raise SpecBenchError(f"{path} is no file of tensors, or damaged; {hint}") from error
            raise SpecBenchError(
                f"{path} holds code beside its tensors and is not read; ask its authors for safetensors"
            ) from error


@contextmanager
def open_tensors(path: Path, hint: str = "fetch it again") -> Iterator[dict[str, Callable[[], Tensor]]]:
    """The tensors of a file by name, each read when called. Raises `SpecBenchError` for damage, also while reading."""
    with refusing(f"{path} is damaged or cut off; {hint}"):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                yield {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict
        else:
            found = unpickled(path, hint)
            if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
                raise SpecBenchError(f"{path} is no state dict of tensors; {hint}")
            yield {str(name): partial(found.__getitem__, name) for name in found}


def read_tensors(path: Path, hint: str = "fetch it again") -> dict[str, Tensor]:
    """All tensors of a file. Raises `SpecBenchError` for damage, NaN or infinity."""
    with open_tensors(path, hint) as opened:
        tensors = {name: read() for name, read in opened.items()}
    if bad := [name for name, tensor in tensors.items() if not finite(tensor)]:
        raise SpecBenchError(f"{path} holds NaN or infinity in {some(bad)}; {hint}")
    return tensors


def finite(tensor: Tensor) -> bool:
    """Does it hold neither NaN nor infinity?"""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return True
    total = tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))  # needs no memory
    return bool(total.isfinite()) or bool(tensor.isfinite().all())  # a sum of finite numbers may overflow


def some(names: Iterable[str]) -> str:
    """The first few of many, for a message."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
