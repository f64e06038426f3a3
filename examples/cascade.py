"""Cascade attention: decoding of many sequences with a common prefix, which is read only once.

  python examples/cascade.py
  python examples/cascade.py --sequences 64 --prefix 8192 --device cuda

The example is one decoding step with keys in pages, in which the common prefix is stored once. In
plain decoding every sequence reads its whole block table, and so the pages of the prefix again. In
a cascade, the queries of all sequences are the rows of one attention to the prefix, and each query
has a separate attention to its suffix. `merge_states` combines both results. The result is exact,
because both have their lse.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import models
import tilewise


@dataclass
class Problem:
    """One decoding step of B sequences whose first ``prefix`` keys are in the same pages."""

    q: Tensor  # [B, 1, Hq, D]
    k_pages: Tensor  # [pages, page_size, Hkv, D]
    v_pages: Tensor
    block_table: Tensor  # [B, width] int32
    lengths: Tensor  # [B] int32, including the prefix
    prefix: int  # a multiple of the page size

    def __post_init__(self) -> None:
        """Computes the index tensors of a cascade, which a server makes once per step."""
        b, pages = self.q.shape[0], self.prefix // self.k_pages.shape[1]
        self.cu_seqlens = self.lengths.new_tensor([0, b])  # all queries are rows of one sequence
        self.prefix_lengths = self.lengths.new_tensor([self.prefix])
        self.prefix_table = self.block_table[:1, :pages].contiguous()
        self.suffix_lengths = self.lengths - self.prefix
        self.suffix_table = self.block_table[:, pages:].contiguous()


def make(options: argparse.Namespace) -> Problem:
    """A problem with suffixes of different lengths."""
    torch.manual_seed(0)
    b, size = options.sequences, options.page_size
    prefix_pages, suffix_pages = options.prefix // size, -(-options.suffix // size)
    total = prefix_pages + b * suffix_pages
    page = (size, options.kv_heads, options.head_dim)
    kind = dict(device=options.device, dtype=models.DTYPES[options.dtype])
    k_pages, v_pages = (torch.randn(total, *page, **kind) for _ in range(2))
    shared = torch.arange(prefix_pages).expand(b, prefix_pages)
    separate = torch.arange(prefix_pages, total).view(b, suffix_pages)
    table = torch.cat([shared, separate], 1)
    lengths = prefix_pages * size + torch.randint(1, options.suffix + 1, (b,))
    return Problem(
        torch.randn(b, 1, options.heads, options.head_dim, **kind),
        k_pages,
        v_pages,
        table.to(options.device, torch.int32),
        lengths.to(options.device, torch.int32),
        prefix_pages * size,
    )


def plain(p: Problem) -> tuple[Tensor, Tensor]:
    """(out [B, 1, Hq, D], lse [B, Hq, 1]) of a call in which each sequence reads all its pages."""
    return tilewise.attention_with_kvcache(
        p.q, p.k_pages, p.v_pages, cache_seqlens=p.lengths, block_table=p.block_table,
        return_lse=True,
    )  # fmt: skip


def cascade(p: Problem) -> tuple[Tensor, Tensor]:
    """The same results from a cascade, which reads the prefix once."""
    out_prefix, lse_prefix = tilewise.attention_varlen(
        p.q.squeeze(1), p.k_pages, p.v_pages, p.cu_seqlens, None, seqused_k=p.prefix_lengths,
        block_table=p.prefix_table, max_seqlen_q=p.q.shape[0], max_seqlen_k=p.prefix,
        return_lse=True,
    )  # fmt: skip
    out_suffix, lse_suffix = tilewise.attention_with_kvcache(
        p.q, p.k_pages, p.v_pages, cache_seqlens=p.suffix_lengths, block_table=p.suffix_table,
        return_lse=True,
    )  # fmt: skip
    # The results for the prefix are packed, out [B, Hq, D] and lse [Hq, B]; those for the suffixes
    # have a batch dimension and one row.
    return tilewise.merge_states(
        out_prefix.unsqueeze(1), lse_prefix.t().unsqueeze(-1), out_suffix, lse_suffix
    )


def bytes_read(p: Problem) -> tuple[int, int]:
    """Bytes of keys and values that (plain, cascade) read."""
    key = 2 * p.k_pages[0, 0].nbytes
    total, b = int(p.lengths.sum()), p.q.shape[0]
    return total * key, (total - (b - 1) * p.prefix) * key


def milliseconds(run: Callable[[], object], device: str, rounds: int = 20) -> float:
    """The median time of several calls."""
    times = []
    for _ in range(rounds):
        if device != "cpu":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e3


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=models.Help)
    add = parser.add_argument
    add("--sequences", type=int, default=16, help="number of sequences")
    add("--prefix", type=int, default=2048, help="common tokens, rounded down to whole pages")
    add("--suffix", type=int, default=100, help="largest number of further tokens of a sequence")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--heads", type=int, default=8, help="query heads")
    add("--kv-heads", type=int, default=2, help="key and value heads")
    add("--head-dim", type=int, default=64, help="columns of a head")
    add("--dtype", choices=[*models.DTYPES], default="fp32", help="dtype of all tensors")
    add("--device", default=models.default_device(), help="cpu, cuda, cuda:1, ...")
    options = parser.parse_args(arguments)
    for name in ("sequences", "suffix", "page_size", "heads", "kv_heads", "head_dim"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} is {getattr(options, name)}, but must be >= 1")
    if options.prefix < options.page_size:
        parser.error(
            f"--prefix is {options.prefix}, but must be at least a page, {options.page_size}"
        )
    if options.heads % options.kv_heads:
        parser.error(f"--heads is {options.heads}, but must be a multiple of --kv-heads, "
                     f"{options.kv_heads}")  # fmt: skip
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares both ways. Returns 0 if their results agree, 1 otherwise."""
    options = parse(arguments)
    p = make(options)
    (out, lse), (out_cascade, lse_cascade) = plain(p), cascade(p)
    error = (out_cascade.double() - out.double()).abs().max() / out.double().abs().max()
    error_lse = (lse_cascade - lse).abs().max()
    # In fp32 each result is within 1e-6 of the exact one. In 16 bits the merged outputs have been
    # rounded, and the output over the few keys of a suffix may be larger than that over all keys.
    allowed = max(2e-6, 2 * torch.finfo(out.dtype).eps)
    print(
        f"{options.sequences} sequences, {p.prefix} common keys and up to {options.suffix} others, "
        f"{options.heads}/{options.kv_heads} heads of {options.head_dim}, {options.dtype}, "
        f"{options.device}"
    )
    print(f"largest difference: {error:.1e} of the largest output (allowed {allowed:.1e}), "
          f"{error_lse:.1e} in lse")  # fmt: skip
    reads = bytes_read(p)
    print(f"keys and values read: plain {reads[0] / 1e6:.1f} MB, cascade {reads[1] / 1e6:.1f} MB: "
          f"{1 - reads[1] / reads[0]:.0%} saved")  # fmt: skip
    times = [milliseconds(lambda f=f: f(p), options.device) for f in (plain, cascade)]
    print(f"time: plain {times[0]:.2f} ms, cascade {times[1]:.2f} ms: {times[0] / times[1]:.2f}x")
    if error > allowed or error_lse > allowed:
        print("NOT the same result")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
