"""How much a server gives several clients.

Clients are threads of one process, each with a connection, a drafter and a cache on the server of its own: they share the
server, as they should, and the cores of one client, which whoever reads the number should know.
"""

import threading
import time
from collections.abc import Callable, Sequence

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

    Raises:
        RuntimeError: a client failed.
    """
    made = [connect() for _ in range(clients)]
    found: list[tuple[int, float, float] | None] = [None] * clients
    ready = threading.Barrier(clients + 1)

    def work(number: int) -> None:
        target, drafter = made[number]
        ready.wait()
        begin, emitted, waited = time.perf_counter(), 0, 0.0
        for place in range(len(prompts)):
            prompt = prompts[(place + number) % len(prompts)]
            events = decode(target, drafter, prompt, Limits(tokens, target.stop_ids), Lossless(), Sampler())
            emitted += sum(len(event.tokens) if isinstance(event, Step) else 1 for event in events)
            waited += target.traffic.waited_s
        found[number] = emitted, time.perf_counter() - begin, waited

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    done = [one for one in found if one is not None]
    if len(done) < clients:
        raise RuntimeError(f"{clients - len(done)} of {clients} clients failed; see above")
    for target, _ in made:
        target.close()
    return {
        "together": sum(emitted for emitted, *_ in done) / seconds,
        "slowest": min(emitted / took for emitted, took, _ in done),
        "waited": sum(waited for *_, waited in done) / sum(took for _, took, _ in done),
    }
