"""Serve a target to clients that draft elsewhere.

python -m specbench.serve model=smollm2-135m port=5555
python -m specbench.run link=tcp://127.0.0.1:5555 drafter=eagle2
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from hydra.utils import instantiate
from pydantic import Field

from specbench.common.types import Duration, Name, Nodes, Rows, Text, Threads, Tokens
from specbench.config import run_spec, validation
from specbench.config.cli import command, run_cli
from specbench.engine.loading import ModelSpec
from specbench.remote import serving
from specbench.remote.transport import parse_address, secret_key


@dataclass(frozen=True)
class Options:
    """The options in `conf/serve.yaml`, which explains each."""

    host: Text
    port: Annotated[int, Field(ge=0, le=65535)]
    threads: Threads | None
    clients: Rows
    megabytes: Annotated[int, Field(ge=1, le=4096)] | None
    nodes: Nodes
    prompt: Tokens | None
    condense: Name | None
    idle_s: Duration
    model: ModelSpec


@command("serve")
def main(config: Any) -> None:
    """Load, print the address, serve until interrupted."""
    validation.check(config, Options)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"tcp://{host}:{config.port}"
    parse_address(address), secret_key(address)  # refused before anything is loaded
    torch.set_num_threads(config.threads or torch.get_num_threads())
    limits = {key: config[key] for key in ("clients", "megabytes", "nodes", "prompt", "idle_s")}
    compressors = run_spec.state_compressors(config.condense, config.model)
    server = serving.server(instantiate(config.model), address, **limits, condensers=compressors)
    print(f"{config.model.name} at {server.address}; end with Ctrl-C", file=sys.stderr, flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        print("ended", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main, "serve")
