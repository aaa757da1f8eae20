r"""A TCP proxy that emulates a network: in both directions bytes pass in order, delayed and at a limited bandwidth.

A lost packet is a pause, as with TCP. Imports the standard library alone, so that it starts fast in its own process:

    python -m specbench.remote.network_emulator HOST PORT \
        '{"delay_ms": 10, "jitter_ms": 10, "mbit": 50, "loss": 0.001, "pause_ms": 200}'

prints the port at which it listens on loopback, and ends when its standard input is closed.
"""

import asyncio
import json
import math
import random
import selectors
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

CHUNK = 16384  # bytes that share one delay
PACKET = 1500
MAX_CHUNKS = 256  # in flight in one direction; further ones wait
Chunks: TypeAlias = "asyncio.Queue[tuple[float, bytes]]"  # time of arrival, and bytes; empty at the end


@dataclass(frozen=True)
class Network:
    """One direction: delay N(delay, jitter) of at least 0, bandwidth, probability of a lost packet, pause after one."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float | None = None
    loss: float = 0.0
    pause_ms: float = 200.0

    def latency_s(self, size: int) -> float:
        """Random seconds of delay of a chunk, without its transmission time."""
        delay = max(0.0, random.gauss(self.delay_ms, self.jitter_ms))
        lost = random.random() >= (1 - self.loss) ** -(-size // PACKET)
        return (delay + lost * self.pause_ms) / 1000

    def mean_latency_s(self) -> float:
        """The mean of `latency_s` for a message that fits into one packet."""
        mean, spread = self.delay_ms, self.jitter_ms
        if spread:
            z = mean / spread
            below = 0.5 * math.erfc(z / math.sqrt(2))
            mean = mean * (1 - below) + spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return (mean + self.loss * self.pause_ms) / 1000

    def transmission_s(self, size: int) -> float:
        return size * 8 / (self.mbit * 1e6) if self.mbit else 0.0


def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, network: Network) -> list["asyncio.Task[None]"]:
    """Tasks that forward everything until the end of the stream. They raise `OSError` if either side breaks off."""
    in_flight: Chunks = asyncio.Queue(MAX_CHUNKS)
    return [asyncio.create_task(part) for part in (_receive(reader, in_flight, network), _deliver(in_flight, writer))]


async def _receive(reader: asyncio.StreamReader, in_flight: Chunks, network: Network) -> None:
    loop = asyncio.get_running_loop()
    sent = arrival = 0.0  # of the last chunk, on the loop's clock
    while data := await reader.read(CHUNK):
        sent = max(sent, loop.time()) + network.transmission_s(len(data))
        arrival = max(arrival, sent + network.latency_s(len(data)))
        await in_flight.put((arrival, data))
    await in_flight.put((0.0, b""))


async def _deliver(in_flight: Chunks, writer: asyncio.StreamWriter) -> None:
    while (chunk := await in_flight.get())[1]:
        await asyncio.sleep(max(0.0, chunk[0] - asyncio.get_running_loop().time()))
        writer.write(chunk[1])
        await writer.drain()
    writer.close()


async def listen(host: str, port: int, network: Network) -> asyncio.Server:
    """Listen at a port on loopback and forward to host and port over the emulated network."""

    async def pair(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        tasks = [*_forward(reader, server_writer, network), *_forward(server_reader, writer, network)]
        with suppress(OSError, asyncio.CancelledError):  # a side broke off, or the emulator ends
            await asyncio.gather(*tasks)
        for part in tasks:
            part.cancel()
        server_writer.close()
        writer.close()

    return await asyncio.start_server(pair, "127.0.0.1", 0)


async def _main(host: str, port: str, network: str) -> None:
    server = await listen(host, int(port), Network(**json.loads(network)))
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    connections = asyncio.all_tasks() - {asyncio.current_task()}
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


if __name__ == "__main__":
    # `select` waits for microseconds, where asyncio's usual selector rounds up to milliseconds.
    asyncio.SelectorEventLoop(selectors.SelectSelector()).run_until_complete(_main(*sys.argv[1:]))
