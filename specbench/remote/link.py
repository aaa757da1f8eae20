"""The link to the target, as `conf/link/*.yaml` describes it: in this process, or on a server, over an emulated network."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import StringConstraints

from specbench.common.errors import SpecBenchError
from specbench.common.types import Count, Delay, Duration, Name, Positive, Share
from specbench.remote.network_emulator import Network
from specbench.remote.target import OnDisconnect, RemoteTarget
from specbench.remote.transport import parse_address, secret_key

Address = Annotated[str, StringConstraints(pattern=r"^tcp://\S+:\d{1,5}$")]


@dataclass(frozen=True)
class Link:
    """A link; `conf/link/local.yaml` explains the options."""

    name: Name
    to: Address | None = None
    delay_ms: Delay = 0.0
    jitter_ms: Delay = 0.0
    mbit: Positive | None = None
    loss: Share = 0.0
    pause_ms: Delay = 200.0
    timeout_s: Duration = 60.0
    cut_after: Count | None = None
    on_disconnect: OnDisconnect = "wait"
    condense: Name | None = None
    states: Literal["exact", "int8"] = "exact"

    def __post_init__(self) -> None:
        if self.local and (given := [f.name for f in fields(self)[1:] if getattr(self, f.name) != f.default]):
            raise SpecBenchError(
                f"link.{given[0]} is for a target on a server; choose a link, such as link=lan, or leave it out"
            )

    @property
    def local(self) -> bool:
        """Is the target in this process?"""
        return self.name == "local"

    def connect(self, path: Path, dtype: torch.dtype, device: torch.device) -> RemoteTarget:
        """The server's target. path: the folder of its model, here."""
        assert self.to is not None
        network = Network(self.delay_ms, self.jitter_ms, self.mbit, self.loss, self.pause_ms)
        emulated = network != Network(pause_ms=self.pause_ms)
        address, emulator = _emulate(self.to, network) if emulated else (self.to, None)
        int8 = self.states == "int8"
        target = RemoteTarget.at(
            address, path, dtype, device,
            timeout_s=self.timeout_s, on_disconnect=self.on_disconnect, cut_after=self.cut_after, int8_states=int8,
        )  # fmt: skip
        target.server, target.emulator = self.to, emulator
        return target


def _emulate(address: str, network: Network) -> tuple[str, "subprocess.Popen[str]"]:
    """The loopback address of a new emulator that forwards to `address`, and its process.

    The process ends when its standard input closes: with this process, or with the last reference to the returned object.
    """
    host, port = parse_address(address)
    secret_key(address)  # the check for a token, which the emulator's loopback address would pass
    command = [sys.executable, "-m", "specbench.remote.network_emulator", host, str(port), json.dumps(asdict(network))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if not (listening := process.stdout.readline().strip()):
        raise SpecBenchError("the network emulator did not start (python -m specbench.remote.network_emulator)")
    return f"tcp://127.0.0.1:{listening}", process
