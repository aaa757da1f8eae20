"""The link to the target, as `conf/link/*.yaml` describes it: in this process, or on a server, over an emulated network."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import StringConstraints

from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Name, Positive, Share, Weight
from specbench.remote.network_emulator import Shape
from specbench.remote.target import RemoteTarget, Then
from specbench.remote.transport import parse_address, secret_key

Address = Annotated[str, StringConstraints(pattern=r"^tcp://\S+:\d{1,5}$")]


@dataclass(frozen=True)
class Link:
    """A link; what each option means stands in `conf/link/local.yaml`."""

    name: Name
    to: Address | None = None
    delay_ms: Weight = 0.0
    jitter_ms: Weight = 0.0
    mbit: Positive | None = None
    loss: Share = 0.0
    pause_ms: Weight = 200.0
    patience_s: Positive = 60.0
    cut_after: Count | None = None
    then: Then = "wait"
    condense: Name | None = None
    states: Literal["exact", "int8"] = "exact"

    @property
    def local(self) -> bool:
        """Is the target in this process?"""
        return self.name == "local"

    def connect(self, path: Path, dtype: torch.dtype, device: torch.device) -> RemoteTarget:
        """The server's target. path: the folder of its model, here."""
        assert self.to is not None
        shape = Shape(self.delay_ms, self.jitter_ms, self.mbit, self.loss, self.pause_ms)
        emulated = shape != Shape(pause_ms=self.pause_ms)
        address, emulator = _emulate(self.to, shape) if emulated else (self.to, None)
        more = {"patience_s": self.patience_s, "then": self.then, "cut_after": self.cut_after}
        target = RemoteTarget.at(address, path, dtype, device, eight=self.states == "int8", **more)
        target.server, target.emulator = self.to, emulator
        return target


def _emulate(address: str, shape: Shape) -> tuple[str, "subprocess.Popen[str]"]:
    """The loopback address of a new emulator that forwards to another address, and its process.

    It ends when its standard input closes: with this process, or with the last reference to what is returned.
    """
    host, port = parse_address(address)
    secret_key(address)  # checked here, since the address behind is loopback
    command = [sys.executable, "-m", "specbench.remote.network_emulator", host, str(port), json.dumps(asdict(shape))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = process.stdout.readline().strip()
    if not found:
        raise SpecBenchError("the link's shaper did not start (python -m specbench.remote.network_emulator)")
    return f"tcp://127.0.0.1:{found}", process
