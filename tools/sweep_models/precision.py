"""Eager attention in fp64, even where a model explicitly asks for fp32, and errors against it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LOW = (torch.float32, torch.bfloat16, torch.float16)
_DRAWN = ("aten::rand", "aten::randn", "aten::rand_like", "aten::randn_like")
FLOOR = 8  # units in the last place of the largest number that are always tolerated
# The following are relative to the largest number.
CHOICE = 0.1  # in 16 bits, a larger error means that a discrete choice differs (an expert, say)
USABLE = 1e-3  # if eager attention in fp32 differs by more, the fp64 run is no reference
SAME = 1e-4  # allowed distance from eager attention where there is no reference


class _Double(TorchDispatchMode):
    """Turns every conversion to lower precision into one to fp64; random numbers are drawn in fp32,
    so that they equal those of an fp32 run.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name in _DRAWN:
            kwargs["dtype"] = torch.float32
            return func(*args, **kwargs).double()
        if kwargs.get("dtype") in _LOW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def double() -> Iterator[None]:
    """Within this context, everything is computed in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Double():
            yield
    finally:
        torch.set_default_dtype(before)


def converted(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs, with floating-point ones converted to this dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of an output by name, without caches."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if "past_key_values" not in name and "cache" not in name:
                yield from tensors(value, f"{path}.{name}" if path else str(name))
    elif isinstance(output, tuple | list):
        for index, value in enumerate(output):
            yield from tensors(value, f"{path}.{index}" if path else str(index))


@dataclasses.dataclass
class Error:
    """The largest errors of one output of eager attention and of Tilewise against the reference,
    relative to its largest number.
    """

    name: str
    ours: float
    eager: float
    limit: float
    why: str = ""
    typical: tuple[float, float] = (0.0, 0.0)  # errors (Tilewise, eager) in the median row

    @property
    def passes(self) -> bool:
        if self.why:
            return False
        if self.eager > CHOICE:
            return self.ours <= self.limit or self.typical[0] <= 2 * self.typical[1]
        return self.ours <= self.limit

    @property
    def excess(self) -> float:
        """Above 1 the output fails."""
        return float("inf") if self.why else self.ours / max(self.limit, 1e-300)


def errors(
    reference: Any, eager: Any, ours: Any, eps: float, rows: Mapping[int | None, Tensor]
) -> list[Error]:
    """The errors of all outputs.

    Args:
        reference: Output in fp64.
        eager: Output of eager attention.
        ours: Output of Tilewise.
        eps: Epsilon of the dtype that both were computed in.
        rows: By sequence length, a mask [batch, length] of the rows that are meaningful; for None,
            a mask [batch] of the sequences whose outputs without a row dimension are meaningful.
    """
    ours_by_name = dict(tensors(ours))
    eager_by_name = dict(tensors(eager))
    found = []
    for name, exact in tensors(reference):
        given, usual = ours_by_name.get(name), eager_by_name.get(name)
        if given is None or usual is None or given.shape != usual.shape:
            shape = None if given is None else list(given.shape)
            found.append(
                Error(name, 0, 0, 0, f"{name} has shape {shape} instead of {list(exact.shape)}")
            )
            continue
        if exact.shape != usual.shape:
            exact = usual
        found.append(_error(name, exact, usual, given, eps, rows))
    return found


def _typical(error: Tensor) -> float:
    """The median over rows of the largest error of a row. A number, such as a loss, is one row."""
    rows = error.reshape(-1, error.shape[-1] if error.dim() > 1 else 1)
    return float(rows.amax(-1).median())


def _error(
    name: str,
    exact: Tensor,
    usual: Tensor,
    given: Tensor,
    eps: float,
    rows: Mapping[int | None, Tensor],
) -> Error:
    exact, usual, given = (x.detach().double() for x in (exact, usual, given))
    mask = rows.get(exact.shape[1], rows.get(None)) if exact.dim() >= 2 else None
    if mask is not None and mask.shape[0] == exact.shape[0]:
        exact, usual, given = exact[mask], usual[mask], given[mask]
    if not exact.numel():
        return Error(name, 0, 0, 0)
    finite = usual.isfinite()
    count = int((finite & ~given.isfinite()).sum())
    if count:
        return Error(name, 0, 0, 0, f"{count} numbers of {name} are not finite where eager's are")
    both = finite & exact.isfinite()
    if not both.any():
        return Error(name, 0, 0, 0, f"eager attention gives no finite number of {name}")
    exact, usual, given = (x.where(both, 0.0) for x in (exact, usual, given))
    scale = float(exact.abs().max()) or 1.0
    of_eager, of_ours = (usual - exact).abs() / scale, (given - exact).abs() / scale
    eager, ours = float(of_eager.max()), float(of_ours.max())
    single = torch.finfo(torch.float32).eps
    if eps <= single and eager > USABLE:
        ours = min(ours, float((given - usual).abs().max()) / scale)
        return Error(name, ours, 0.0, SAME)
    typical = (_typical(of_ours), _typical(of_eager) + FLOOR * eps)
    return Error(name, ours, eager, 2 * eager + FLOOR * eps, typical=typical)
