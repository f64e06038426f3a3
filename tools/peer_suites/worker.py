"""A process that imports a test file on top of ``tilewise.compat`` and runs the requested cases."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from peer_suites.cases import Function, functions
from peer_suites.known import difference

ROOT = Path(__file__).resolve().parents[2]


class Settings(NamedTuple):
    """The settings that every process of a run gets."""

    file: str
    device: str
    largest: int  # cases with a larger integer argument are deselected; 0: none
    memory: float  # fraction of the GPU's memory that the process may use


class Result(NamedTuple):
    """The outcome of a case."""

    function: str
    number: int  # number of the case
    outcome: str
    why: str = ""
    seconds: float = 0.0
    fatal: bool = False  # the process cannot continue


def serve(connection: Connection, settings: Settings) -> None:
    """Runs (function, index) for each message, until None comes."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (the tests print every difference)
    try:
        by_name = {f.name: f for f in functions(_load(settings))}
    except BaseException as error:
        connection.send(f"{settings.file} cannot be imported: {type(error).__name__}: {error}")
        return
    connection.send([(f.name, f.total, f.skipped) for f in by_name.values()])
    while (task := connection.recv()) is not None:
        name, index = task
        result = _run(by_name[name], index, settings)
        connection.send(result)
        if result.fatal:
            return


def _load(settings: Settings) -> Any:
    """The test module, whose imports of FlashAttention resolve to tilewise.compat."""
    import torch

    if settings.device == "cpu":
        _without_gpu(torch)
    else:
        torch.cuda.set_per_process_memory_fraction(settings.memory)
    file = Path(settings.file).resolve()
    sys.path[:0] = [str(ROOT / "packages" / "flash-attn-shim"), str(file.parent)]

    fa2 = importlib.import_module("flash_attn.flash_attn_interface")
    fa3 = importlib.import_module("tilewise.compat.flash_attn_interface")

    sys.modules["flash_attn_interface"] = fa3
    for name, stand_in in (("_get_block_size_n", lambda *_: 128), ("USE_TRITON_ROCM", False)):
        if not hasattr(fa2, name):
            setattr(fa2, name, stand_in)
    spec = importlib.util.spec_from_file_location("peer_suite", file)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "normalize_flash_attn_S"):
        module.normalize_flash_attn_S = lambda probabilities, *_, **__: probabilities
    return module


def _without_gpu(torch: Any) -> None:
    """For a trial without a GPU: tensors requested on "cuda" are created on the CPU."""
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            args = tuple("cpu" if isinstance(x, str) and x == "cuda" else x for x in args)
            return function(*args, **kwargs)

    OnCpu().__enter__()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: type("Gpu", (), {"total_memory": 80 << 30})


def _too_large(arguments: dict[str, Any], largest: int) -> bool:
    return largest > 0 and any(type(x) is int and x > largest for x in arguments.values())


def _run(function: Function, index: int, settings: Settings) -> Result:
    arguments = function.case(index)
    if function.skipped:
        return Result(function.name, index, "skipped", function.skipped)
    if why := difference(function.name, arguments):
        return Result(function.name, index, "deselected", why)
    if _too_large(arguments, settings.largest):
        return Result(function.name, index, "deselected", f"larger than {settings.largest}")
    begin = time.monotonic()
    outcome, why, fatal = _outcome(function, arguments, settings.device)
    return Result(function.name, index, outcome, why, time.monotonic() - begin, fatal)


def _outcome(function: Function, arguments: dict[str, Any], device: str) -> tuple[str, str, bool]:
    import pytest
    import torch

    try:
        function.call(**arguments)
        if device == "cuda":
            torch.cuda.synchronize()
        return "passed", "", False
    except pytest.skip.Exception as reason:
        return "skipped", str(reason), False
    except NotImplementedError as refusal:
        return "refused", str(refusal), False
    except torch.OutOfMemoryError as error:
        out_of_memory = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {' '.join(lines[:2])[:300]}{_where(error, function)}"
        if "can't allocate memory" in why:  # on the CPU
            return "out of memory", why, False
        # After a device error, every later call of the process fails.
        return "failed", why, "CUDA error" in str(error) or "AcceleratorError" in why
    gc.collect()
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()
    return "out of memory", out_of_memory[:200], False


def _where(error: BaseException, function: Function) -> str:
    """The line of the test file that failed."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code is function.call.__code__:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""
