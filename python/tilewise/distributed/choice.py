"""Which method a call uses: the one with the lower predicted time."""

from __future__ import annotations

from typing import NamedTuple

from .cost import CPU, GPU, Shape, Work, allgather_work, predicted, ring_work, ulysses_work
from .problem import BOTH, METHODS, Problem


class Choice(NamedTuple):
    """The method of a call, the reason, and the predicted work and seconds that were compared.

    Printed, it is a table with one line per method.
    """

    method: str
    reason: str
    estimates: dict[str, Work]
    seconds: dict[str, float]

    def __str__(self) -> str:
        lines = [f"method: {self.method} ({self.reason})"]
        for name, work in self.estimates.items():
            lines.append(
                f"  {name}: {work.bytes / 1e6:.3f} MB received in {work.messages} messages, "
                f"{work.flops / 1e9:.3f} GFLOP, predicted {self.seconds[name] * 1e3:.3f} ms on the "
                "busiest rank"
            )
        return "\n".join(lines)


def choose(p: Problem, method: str) -> Choice:
    """The method that a call uses; the same on all ranks."""
    if p.ranks.world == 1:
        return Choice("local", "one rank has the whole sequence", {}, {})
    if p.grid is not None:
        name = BOTH if method == "auto" else method
        return Choice(name, "the mesh has two dimensions", {}, {})
    shape = Shape(
        p.q.shape[0], p.heads, (p.q.shape[3], p.v.shape[3]),
        (p.q.element_size(), p.k.element_size(), p.out_dtype.itemsize), p.q.device,
        p.differentiable, p.request.return_lse,
    )  # fmt: skip
    works = (("ulysses", ulysses_work), ("allgather", allgather_work), ("ring", ring_work))
    estimates = {name: work(shape, p.cut) for name, work in works}
    speeds = GPU if p.q.device.type == "cuda" else CPU  # the ranks agree on the device
    seconds = {name: predicted(work, speeds) for name, work in estimates.items()}
    if method != "auto":
        return Choice(method, "named by the call", estimates, seconds)
    # "ring" takes no less time than "allgather": a call that needs its memory must name it.
    best = min(METHODS, key=seconds.__getitem__)
    return Choice(best, "the lower predicted time", estimates, seconds)
