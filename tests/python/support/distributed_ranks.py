"""Processes that run functions of the tests as the ranks of groups of 1 to 4 processes: over gloo,
or over NCCL with a GPU each if TILEWISE_TEST_DISTRIBUTED=cuda is in the environment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from paths import IMPORTS

START = 120.0  # seconds to import torch on a busy machine
WAIT = 60.0  # seconds after which a hang is a failure


CUDA = os.environ.get("TILEWISE_TEST_DISTRIBUTED") == "cuda"


def device() -> Any:
    """The device of this rank."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


def _serve(rank: int, count: int, store: str, pipe: Connection, wait: float) -> None:
    """Runs in each process: joins a group of every size, then runs the jobs from the pipe.

    A job that takes nearly as long as it may prints where it is.
    """
    import datetime
    import faulthandler

    import torch
    import torch.distributed as dist

    sys.path[:0] = IMPORTS  # before bench/, which has a cases.py too
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=wait)
    if CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if CUDA else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timeout,
    )
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in range(1, count + 1)}
    pipe.send("ready")
    while True:
        job = pipe.recv()
        if job is None:
            break
        number, function, size, arguments = job
        faulthandler.dump_traceback_later(0.9 * WAIT)
        try:
            pipe.send((number, True, function(groups[size], *arguments)))
        except Exception:
            pipe.send((number, False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # without the shutdown of gloo, which may wait for a rank that was killed


class Pool:
    """`count` processes, or as many as there are GPUs; a job uses the first few.

    Their groups have a timeout of `wait` seconds.
    """

    def __init__(self, count: int, wait: float = WAIT) -> None:
        if CUDA:
            import torch

            count = min(count, torch.cuda.device_count())
        # Forked from a process that has imported the slow modules but started no threads: a quarter
        # of the time of importing them in each rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor"])
        self.folder = tempfile.TemporaryDirectory()
        self.job = 0, ""  # the number and the function of the last job
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            store = os.path.join(self.folder.name, "store")
            process = context.Process(
                target=_serve, args=(rank, count, store, there, wait), daemon=True
            )
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(START), "a rank did not start"
            pipe.recv()

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of function(group, *arguments) on the ranks of the group of that size.

        The test is skipped if there are fewer ranks.
        """
        if size > len(self.pipes):
            pytest.skip(f"needs {size} ranks, but there are {len(self.pipes)}")
        self.start(range(size), size, function, *arguments)
        replies = [self.reply(rank) for rank in range(size)]
        failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(replies) if not good]
        assert not failed, "\n".join(failed)
        return [value for _, value in replies]

    def start(
        self, ranks: Iterable[int], size: int, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Sends a job of the group of that size to some of its ranks."""
        self.job = self.job[0] + 1, function.__name__
        for rank in ranks:
            self.pipes[rank].send((self.job[0], function, size, arguments))

    def reply(self, rank: int, wait: float | None = None) -> tuple[bool, Any]:
        """(True, result) or (False, traceback) of the last job on a rank, within `wait` seconds or
        WAIT. Replies to earlier jobs, which were given up, are dropped.
        """
        number, name = self.job
        while True:
            assert self.pipes[rank].poll(WAIT if wait is None else wait), f"{name}: {rank=} hangs"
            try:
                replied, good, value = self.pipes[rank].recv()
            except EOFError:
                raise AssertionError(f"{name}: the process of {rank=} has ended") from None
            if replied == number:
                return good, value

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # of a rank that a test has stopped
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()
