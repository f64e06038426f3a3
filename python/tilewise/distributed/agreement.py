"""Ranks compare their calls before they exchange tensors, so that a difference raises an error.

Collectives whose arguments differ between ranks hang or move the wrong bytes. Each call therefore
begins with an exchange of a rank's numbers of rows, keys and rows of the bias, and of a 64-bit hash
of its other arguments. Only if the hashes differ do the ranks exchange the arguments themselves,
and all of them raise. A rank that refuses its own arguments takes part with a hash of its refusal.
Everything that one rank may refuse is therefore checked where it describes its call.

These numbers travel between hosts and never touch a GPU, so the host waits for the hosts of the
other ranks, but no stream waits. A group without a backend for CPU tensors (NCCL alone) gets a gloo
group of the same ranks beside it in its first call. The wait cannot be dropped: the rows of the
whole sequence, which decide the size of every message, are known only when all ranks have told
theirs, and a rank's own rows do not imply them.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from .._autograd import is_transformed
from .ranks import Ranks, exchanging, gather_equal

_REFUSED = "refused"
NUMBERS = 3  # how many numbers every call sends, whichever function it is


class Description(NamedTuple):
    """The values that must be the same on all ranks, by name, and numbers that may differ."""

    same: dict[str, str]
    numbers: tuple[int, ...] = ()


def agree(ranks: Ranks, function: str, describe: Callable[[], Description]) -> list[list[int]]:
    """Compares the calls of all ranks; returns the numbers of each.

    Args:
        ranks: The ranks that take part.
        function: The name of the function that was called.
        describe: Checks this rank's arguments and describes them. An error that it raises is raised
            here, after the other ranks have been told.

    Raises:
        NotImplementedError: a transform of torch.func is active.
        ValueError: the ranks differ, or another rank refused its arguments. The message names the
            rank, the argument and both values.
    """
    refusal: Exception | None = None
    try:
        if ranks.world > 1 and is_transformed():
            raise NotImplementedError(
                f"tilewise.distributed.{function} is called in a transform of torch.func, but "
                "exchanges tensors between ranks: only autograd differentiates it"
            )
        call = describe()
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        if ranks.world == 1:
            raise
        call, refusal = Description(_refused(error)), error
    numbers = [*call.numbers, *[0] * NUMBERS][:NUMBERS]
    if ranks.world == 1:
        return [numbers]
    with _outside_transforms():
        with exchanging("its arguments", ranks):
            received = exchange([_hash(function, call.same), *numbers], ranks)
        if any(row[0] != received[0][0] for row in received):
            _raise_difference(ranks, function, call.same, refusal)
    if refusal is not None:  # all ranks have refused in the same words
        raise refusal
    return [row[1:] for row in received]


def _outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Where tensors are what the backends can send; transforms of torch.func wrap new ones."""
    if not is_transformed():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    context: contextlib.AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return context


def raise_refusals(ranks: Ranks, function: str, refusal: Exception | None) -> NoReturn:
    """Raises this rank's refusal, or that of another rank; all ranks know that there is one."""
    _raise_difference(ranks, function, {} if refusal is None else _refused(refusal), refusal)


def _refused(error: Exception) -> dict[str, str]:
    """What the other ranks are told: the sentence, without the traces that PyTorch may append."""
    return {_REFUSED: str(error).partition("\n")[0] or type(error).__name__}


def _raise_difference(
    ranks: Ranks, function: str, same: dict[str, str], refusal: Exception | None
) -> NoReturn:
    calls: list[Any] = [None] * ranks.world
    with exchanging("its arguments", ranks):
        dist.all_gather_object(calls, (function, same), group=_host_group(ranks))
    raise ValueError(_difference(calls)) if refusal is None else refusal


def _hash(function: str, same: dict[str, str]) -> int:
    digest = hashlib.blake2b(repr((function, sorted(same.items()))).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


def exchange(numbers: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """The numbers of each rank, which gives as many as every other one."""
    group = _host_group(ranks)
    sent = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    received = sent.new_empty(ranks.world * len(numbers))
    gather_equal(received, sent, group=group)
    return received.view(ranks.world, len(numbers)).tolist()


# By group: the gloo group beside it, or None where the group itself moves CPU tensors.
_beside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _host_group(ranks: Ranks) -> Any:
    """The group itself if it moves CPU tensors, else a gloo group of the same ranks."""
    group: Any = ranks.group
    if group not in _beside:
        _beside[group] = None if _moves_cpu_tensors(group) else _new_host_group(group)
    return _beside[group] or group


def _moves_cpu_tensors(group: Any) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def _new_host_group(group: Any) -> Any:
    """A gloo group of the ranks of `group`.

    ``dist.new_group`` would have to be called by all processes, or names the group after the number
    of groups that a process is in, and then ranks of different numbers of groups wait for ever.
    """
    # NCCL sets up a group in its first collective, in which all ranks must take part; the exchanges
    # of attention may leave out ranks that have nothing to send.
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    token = torch.tensor([secrets.randbits(62)], device=device)
    dist.broadcast(token, group=group, group_src=0)
    store = dist.PrefixStore(f"tilewise/{token.item()}", dist.distributed_c10d._get_default_store())
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    timeout = group._get_backend(device).options._timeout
    beside = dist.ProcessGroup(store, rank, world)
    gloo = dist.ProcessGroupGloo(store, rank, world, timeout)
    beside._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return beside


def _difference(calls: Sequence[tuple[str, dict[str, str]]]) -> str:
    """The sentence about the first rank that differs from rank 0, the same on every rank."""
    first_function, first = calls[0]
    for rank, (function, same) in enumerate(calls):
        if function != first_function:
            return (
                f"tilewise.distributed: rank {rank} calls {function}, but rank 0 calls "
                f"{first_function}: all ranks of a group must make the same call"
            )
        if _REFUSED in same:
            return f"tilewise.distributed.{function}: rank {rank} was refused: {same[_REFUSED]}"
    for rank, (_, same) in enumerate(calls):
        for name in sorted({*same, *first}, key=[*first, *same].index):
            have, want = same.get(name, "nothing"), first.get(name, "nothing")
            if have != want:
                return (
                    f"tilewise.distributed.{first_function}: {name} is {have} on rank {rank}, but "
                    f"{want} on rank 0, and must be the same on all ranks"
                )
    return f"tilewise.distributed.{first_function}: the calls of the ranks differ"
