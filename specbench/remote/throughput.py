"""Throughput of one server with several clients.

Clients are threads of one process, each with a connection, a drafter and a cache on the server of its own. They share the
server and the cores of one client.
"""

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
    """Tokens a second of a server with so many clients, which all decode all prompts, each beginning with another.

    connect: makes one client's target and drafter.

    Returns:
        together: of all clients; slowest: of the one that got least; waited: share of a client's time that it waits.

    An error of a client is raised once all have ended.
    """
    made = [connect() for _ in range(clients)]

    def work(number: int) -> tuple[int, float, float]:
        target, drafter = made[number]
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
    for target, _ in made:
        target.close()
    return {
        "together": sum(emitted for emitted, *_ in done) / seconds,
        "slowest": min(emitted / took for emitted, took, _ in done),
        "waited": sum(waited for *_, waited in done) / sum(took for _, took, _ in done),
    }
