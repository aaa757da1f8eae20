r"""A TCP proxy that emulates a link: bytes pass in order, delayed and at a limited bandwidth, alike in both directions.

A lost packet is a pause, as TCP makes of it, and nothing is reordered. Needs the standard library alone, so that it starts
at once in a process of its own:

    python -m specbench.remote.network_emulator HOST PORT \
        '{"delay_ms": 10, "jitter_ms": 10, "mbit": 50, "loss": 0.001, "pause_ms": 200}'

prints the port at which it listens on loopback, and ends when its standard input is closed.
"""

import asyncio
import json
import math
import random
import sys
from contextlib import suppress
from dataclasses import dataclass

CHUNK = 16384  # bytes that share one delay
PACKET = 1500
MAX_CHUNKS = 256  # under way in one direction; a sender of more waits


@dataclass(frozen=True)
class Shape:
    """One direction: delay N(mean, deviation) cut off at 0, bandwidth, how probable a lost packet is, and what it costs."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float | None = None
    loss: float = 0.0
    pause_ms: float = 200.0

    def late_s(self, size: int) -> float:
        """Seconds by which a chunk is late, without its transmission time."""
        delay = max(0.0, random.gauss(self.delay_ms, self.jitter_ms))
        lost = random.random() >= (1 - self.loss) ** -(-size // PACKET)
        return (delay + lost * self.pause_ms) / 1000

    def mean_late_s(self) -> float:
        """The mean of `late_s` for a message that fits into one packet."""
        mean, spread = self.delay_ms, self.jitter_ms
        if spread:
            z = mean / spread
            below = 0.5 * math.erfc(z / math.sqrt(2))
            mean = mean * (1 - below) + spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return (mean + self.loss * self.pause_ms) / 1000

    def line_s(self, size: int) -> float:
        return size * 8 / (self.mbit * 1e6) if self.mbit else 0.0


async def _shaped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shape: Shape) -> None:
    """Forward everything until the end of the stream."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)

    async def deliver() -> None:
        while (found := await under_way.get())[1]:
            await asyncio.sleep(max(0.0, found[0] - loop.time()))
            writer.write(found[1])
            await writer.drain()
        writer.close()

    delivering = asyncio.create_task(deliver())
    line = due = 0.0  # when the line is free again, when the last chunk is due
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            line = max(line, loop.time()) + shape.line_s(len(data))
            due = max(due, line + shape.late_s(len(data)))
            await under_way.put((due, data))
    await under_way.put((0.0, b""))
    with suppress(ConnectionError):
        await delivering


async def listen(host: str, port: int, shape: Shape) -> asyncio.Server:
    """Listen at a port on loopback and forward to host and port over the emulated network."""

    async def pair(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_shaped(reader, back, shape), _shaped(there, writer, shape))

    return await asyncio.start_server(pair, "127.0.0.1", 0)


async def _main(host: str, port: str, shape: str) -> None:
    server = await listen(host, int(port), Shape(**json.loads(shape)))
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
