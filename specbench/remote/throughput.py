"""Throughput of one server with several clients: threads of one process, each with its own connection and drafter."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from specbench.engine.decode import Limits, Step, decode
from specbench.engine.drafter import Drafter
from specbench.engine.sampling import Sampler
from specbench.engine.verify import Lossless
from specbench.remote.target import RemoteTarget


def throughput(
    clients: int, connect: Callable[[], tuple[RemoteTarget, Drafter]], prompts: Sequence[list[int]], tokens: int
) -> dict[str, float]:
    """Tokens a second of a server whose clients all decode all prompts, each beginning with a different one.

    An error of a client is raised once all have ended.

    Args:
        connect: makes one client's target and drafter. tokens: of an answer.

    Returns:
        together: of all clients. slowest: of the slowest client. waited: share of a client's time that it waits.
    """
    connected = [connect() for _ in range(clients)]

    def work(number: int) -> tuple[int, float, float]:
        target, drafter = connected[number]
        begin, emitted, waited = time.perf_counter(), 0, 0.0
        for index in range(len(prompts)):
            prompt = prompts[(index + number) % len(prompts)]
            events = decode(target, drafter, prompt, Limits(tokens, target.stop_ids), Lossless(), Sampler())
            emitted += sum(len(event.tokens) if isinstance(event, Step) else 1 for event in events)
            waited += target.traffic.waited_s
        return emitted, time.perf_counter() - begin, waited

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        done = list(pool.map(work, range(clients)))
    seconds = time.perf_counter() - begin
    for target, _ in connected:
        target.close()
    return {
        "together": sum(emitted for emitted, *_ in done) / seconds,
        "slowest": min(emitted / duration for emitted, duration, _ in done),
        "waited": sum(waited for *_, waited in done) / sum(duration for _, duration, _ in done),
    }
