"""Starts a server of a configured model: for the command, or in a child process of the run that uses it."""

from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch

from specbench.common.errors import SpecBenchError, format_exception
from specbench.common.processes import end_with_parent
from specbench.engine.loading import ModelSpec
from specbench.remote.protocol import FRAME, Limits, request_bytes
from specbench.remote.server import Server

TIMEOUT_S = 600  # of loading a model
IDLE_S = 3600.0  # after which a server on loopback drops its one client, this process
COPIES = 3  # of a client's message that a server holds at most: arriving, queued, being decoded


def server(
    model: ModelSpec,
    address: str,
    clients: int = 16,
    megabytes: int | None = None,
    nodes: int = 256,
    prompt: int | None = None,
    idle_s: float = 600.0,
    condensers: Sequence[Any] = (),
) -> Server:
    """A server that listens already, and serves when it is `run`; its options are those of `conf/serve.yaml`.

    megabytes: of a message; None: so many that all clients together cannot make the process half as large again.
    condensers: drafters, not yet bound, that condense states before they are sent.
    """
    for name in ("quantised", "adapter"):
        if getattr(model, name) is not None:
            raise SpecBenchError(f"model.{name}: clients cannot tell such a target from its original; leave it out")
    target, _ = model.load(beside=condensers)
    if model.forward == "lean":
        target.optimize_for_inference()
    context = target.max_context
    largest = psutil.Process().memory_info().rss // (2 * COPIES * clients) if megabytes is None else megabytes << 20
    largest = max(FRAME, min(largest, request_bytes(prompt or context, nodes, target.vocab_size)))
    limits = Limits(clients=clients, message=largest, prompt=prompt or context, context=context, nodes=nodes)
    for drafter in condensers:
        drafter.bind(target)
    return Server(target, address, limits, idle_s, [c for c in condensers if c.taps.condensed])


class LocalServers:
    """One server on loopback, in a process of its own.

    It ends with this process, or when another model is asked for, since memory may not hold both.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._model, self._address = "", ""

    def address(self, model: ModelSpec, threads: int | None, condensers: Sequence[Any] = ()) -> str:
        """The address of a model's server, which is started if necessary. condensers: see `server`."""
        key = f"{model} {threads} {[c.name for c in condensers]}"
        if self._process is None or key != self._model or not self._process.is_alive():
            if self._process is not None:
                self._process.terminate()
                self._process.join()
                self._process = None
            self._process, self._address = _start(model, threads, list(condensers))
            self._model = key
        return self._address


def _start(model: ModelSpec, threads: int | None, condensers: list[Any]) -> tuple[BaseProcess, str]:
    context = get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_serve, args=(model, threads, condensers, sender), daemon=True)
    process.start()
    sender.close()
    try:
        message = receiver.recv() if receiver.poll(TIMEOUT_S) else {"error": f"no server within {TIMEOUT_S} s"}
    except EOFError:
        message = {"error": "the server's process was killed while it started; is there enough memory?"}
    if "error" in message:
        raise SpecBenchError(message["error"])
    return process, message["address"]


def _serve(model: ModelSpec, threads: int | None, condensers: list[Any], pipe: Connection) -> None:
    """The main function of the server's process."""
    end_with_parent()
    torch.set_num_threads(threads or torch.get_num_threads())
    try:
        loaded = server(model, "tcp://127.0.0.1:0", idle_s=IDLE_S, condensers=condensers)
    except Exception as error:
        pipe.send({"error": format_exception(error)})
        return
    pipe.send({"address": loaded.address})
    loaded.run()
