"""``explain``: the kernels that a problem will run, and the reasons for choosing them."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from . import _abi, _check, _describe, _latent, _selected
from ._cache import CacheLayout, NewKeys
from ._check import UNBOUNDED, Window
from ._library import c_library
from ._request import Request, Sequences
from .api import attention, attention_varlen
from .kvcache import attention_with_kvcache

# tilewise_plan reads no data, but a null pointer would switch an option off.
_PLACEHOLDER_ADDRESS = 64


@dataclass(frozen=True)
class Plan:
    """The kernel that one pass will run, its sizes, and the reason for the choice.

    Attributes:
        kernel: Its name, such as "cpu.avx512_bf16.forward.bf16".
        why: One line: why this kernel, and why not the faster one.
        tile_q: Query rows of a tile.
        tile_k: Keys of a tile.
        splits: Splits of the keys; in a backward on a CPU, chunks of keys.
        threads: Tasks that may run at a time on a CPU; 0 on a GPU.
        workspace_bytes: Memory that a launch needs besides its tensors.
    """

    kernel: str
    why: str
    tile_q: int
    tile_k: int
    splits: int
    threads: int
    workspace_bytes: int

    def __str__(self) -> str:
        parts = [f"{self.kernel}", f"tiles {self.tile_q} x {self.tile_k}"]
        parts += [f"{self.splits} key splits"] if self.splits > 1 else []
        if self.threads > 0:
            parts += [f"{self.threads} thread" + ("" if self.threads == 1 else "s")]
        parts += [f"workspace {self.workspace_bytes:,} bytes"]
        return f"{', '.join(parts)}; {self.why}"


@dataclass(frozen=True)
class Explanation:
    """The plans of the passes of one call. For a pass that cannot run, a sentence says why.

    Attributes:
        problem: The dtype, device, sizes and options in words.
        forward: The plan of the forward.
        backward: The plan of the backward.
        mask: How many tiles the mask and the band leave; "" without a mask.
        jvp: The plan for the tangents of forward mode; not printed.
        second: The plan for the gradients through these tangents; not printed.
    """

    problem: str
    forward: Plan | str
    backward: Plan | str
    mask: str = ""
    jvp: Plan | str = ""
    second: Plan | str = ""

    def __str__(self) -> str:
        text = f"{self.problem}\n  forward:  {self.forward}\n  backward: {self.backward}"
        return f"{text}\n  mask:     {self.mask}" if self.mask else text


def explain(
    q: Any, k: Any, v: Any = None, *, causal: bool = False, window: Window = UNBOUNDED,
    scale: Any = None, softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None,
    sinks: Any = None, dropout_p: float = 0.0, return_lse: bool = False,
    deterministic: bool = False, tf32: bool = False, layout: str = "bshd", cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    seqused_q: Any = None, seqused_k: Any = None, block_table: Any = None, check: bool = False,
    batch_invariant: bool = False, k_descale: Any = None, v_descale: Any = None,
    mask: Any = None, return_max_logits: bool = False, cache_seqlens: Any = None,
    cache_batch_idx: Any = None, cache_leftpad: Any = None, num_splits: int = 0,
    head_dim_v: int | None = None, indices: Any = None, out_dtype: Any = None,
    precise_backward: bool = False, q_descale: Any = None,
) -> Explanation:  # fmt: skip
    """Says which kernels ``attention`` would run for these arguments, without running them.

    The function that is explained follows from the arguments. With cu_seqlens_q it is
    ``attention_varlen``. With cache_seqlens, cache_batch_idx, cache_leftpad, head_dim_v or indices
    it is ``attention_with_kvcache``, whose caches are k and v; its append is not explained, so
    there are no arguments for new keys, new values and rotary embedding. With indices the problem
    has a sequence for each row of q, whose pages are the selected rows. All arguments are those of
    the explained function, with the same shapes, dtypes, checks and errors.

    Returns:
        Explanation: the kernel, tiles, splits, threads, workspace and reason of each pass. It
        prints as lines about the problem, the forward, the backward and, if given, the mask.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range, or the explained function does
            not take it.
    """
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, check, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    )  # fmt: skip
    _latent.check_one_tensor(head_dim_v, v, None, v_descale)
    if head_dim_v is not None:
        request = request._replace(v_descale=k_descale)
    given = (cache_seqlens, cache_batch_idx, cache_leftpad, head_dim_v, indices)
    cached = any(x is not None for x in given)
    if num_splits != 0 and not cached:
        raise ValueError("num_splits is given, but belongs to cache_seqlens, which is None")
    _check.heads_first(layout)
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, block_table
    )
    function: Callable[..., Any]
    problem: _Problem
    if cached:
        cache_layout = CacheLayout(
            cache_batch_idx, cache_leftpad, block_table, num_splits, check, cu_seqlens_q,
            max_seqlen_q, head_dim_v, indices,
        )  # fmt: skip
        _selected.check_options(cache_layout, NewKeys(), request)
        function, problem = attention_with_kvcache, _Cached(cache_seqlens, cache_layout)
    elif sequences.or_none() is not None:
        function, problem = attention_varlen, sequences
    else:
        function, problem = attention, _Dense(layout)
    _refuse_foreign(function, {**request.arguments(), **sequences._asdict(), "layout": layout})
    tensors = _check.is_tensor(q)
    if tensors:
        a, threads, arrays = _describe_torch(q, k, v, problem, request)
    else:
        a, threads, arrays = _describe_numpy(q, k, v, problem, request)
    if _check.flag("return_max_logits", return_max_logits):
        a.max_logits = _PLACEHOLDER_ADDRESS
    parallel = _abi.Parallel(_abi.PARALLEL_FOR(_never_called), None, threads, 0)
    a.parallel = ctypes.pointer(parallel)
    backward: Plan | str
    jvp: Plan | str
    second: Plan | str
    if cached:
        backward = "attention_with_kvcache has no gradient"
    elif block_table is not None and not tensors:
        backward = "attention_backward takes no block_table: pages of arrays have no gradient"
    else:
        backward = _plan(a, _gradients(a, arrays))
    text = "" if mask is None else _mask_text(mask, a)
    if cached:
        jvp = second = "attention_with_kvcache has no tangent"
    else:
        tangents = _tangents(a, arrays)
        jvp = _plan(a, None, tangents)
        second = _plan(a, _gradients(a, arrays), tangents)
    explanation = Explanation(_sentence(a), _plan(a, None), backward, text, jvp, second)
    del arrays  # kept until here: the struct holds only their addresses
    return explanation


class _Dense(NamedTuple):
    """Sequences of one length."""

    layout: str


class _Cached(NamedTuple):
    """A key/value cache, and the number of keys that each sequence has in it."""

    lengths: Any
    cache_layout: CacheLayout


_Problem: TypeAlias = _Dense | Sequences | _Cached


def _refuse_foreign(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Refuses arguments that differ from their default although the function does not take them."""
    accepted = inspect.signature(function).parameters
    defaults = inspect.signature(explain).parameters
    for name, value in given.items():
        if name in accepted:
            continue
        default = defaults[name].default
        if value is not None if default is None else value != default:
            raise ValueError(f"{name} is given, but {function.__name__} has no such argument")


def _never_called(*_: Any) -> None:
    raise AssertionError("planning runs no task")


def _describe_numpy(
    q: Any, k: Any, v: Any, given: _Problem, request: Request
) -> tuple[Any, int, Any]:
    from . import _kvcache_numpy, _numpy

    state = _numpy.np.random.get_state() if request.dropout_p else None
    if isinstance(given, _Cached):
        problem = _kvcache_numpy.prepare(q, k, v, given.lengths, request, given.cache_layout)
    elif isinstance(given, Sequences):
        problem = _numpy.prepare_varlen(q, k, v, given, request)
    else:
        problem = _numpy.prepare_dense(q, k, v, given.layout, request)
    if state is not None:
        _numpy.np.random.set_state(state)
    return problem.attention, c_library().tilewise_cpu_threads(), problem.arrays


def _describe_torch(
    q: Any, k: Any, v: Any, problem: _Problem, request: Request
) -> tuple[Any, int, Any]:
    import torch

    from . import _kvcache_torch, _torch

    # Without a list of devices, the generators of all GPUs would be saved, with a warning.
    drawn_on = [q.device] if getattr(q, "is_cuda", False) else []
    with torch.random.fork_rng(drawn_on, enabled=bool(request.dropout_p)):
        if isinstance(problem, _Cached):
            layout = problem.cache_layout
            v = _latent.values_of(_torch.as_array("k_cache", k), v, layout.head_dim_v)
            options = _kvcache_torch.prepare(q, k, v, problem.lengths, request, layout)
            if layout.indices is not None:
                q, k, v, options = _kvcache_torch.select(q, k, v, options, layout.indices)
        elif isinstance(problem, Sequences):
            q, k, v, options = _torch.prepare_varlen(q, k, v, problem, request)
        else:
            q, k, v, options = _torch.prepare_dense(q, k, v, problem.layout, request)

    def view(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return _describe.View(_address(tensor), tuple(tensor.shape), tensor.stride())

    given = {name: view(value) for name, value in options._asdict().items()}
    del given["heads_first"]
    bias = options.bias
    given["kv_float8"] = _check.is_float8(k.dtype)
    given["bias_dtype"] = 0 if bias is None else _abi.DTYPES[str(bias.dtype)[len("torch.") :]]
    dtype = _abi.DTYPES[str(q.dtype)[len("torch.") :]]
    device = (_abi.CUDA, q.device.index or 0) if q.is_cuda else (_abi.CPU, 0)
    a = _describe.attention(
        view(q), view(k), view(v), dtype, _describe.OptionalFields(**given), device
    )
    return a, torch.get_num_threads(), {"bias": bias} if bias is not None else {}


def _address(tensor: Any) -> int:
    """The address of a tensor, whose alignment decides between kernels; some have no memory."""
    try:
        return int(tensor.data_ptr()) or _PLACEHOLDER_ADDRESS
    except RuntimeError:
        return _PLACEHOLDER_ADDRESS


def _contiguous(rows: int, heads: int, columns: int) -> Any:
    return _abi.Tensor(_PLACEHOLDER_ADDRESS, rows * heads * columns, heads * columns, columns)


def _set_output(a: Any) -> None:
    a.out = _contiguous(a.seqlen_q, a.heads_q, a.head_dim_v)
    a.lse = _PLACEHOLDER_ADDRESS
    a.lse_stride_batch = a.heads_q * a.seqlen_q
    a.lse_stride_head = a.seqlen_q


def _gradients(a: Any, arrays: dict[str, Any]) -> Any:
    """The struct of all gradients that can be computed, at addresses that are not read."""
    _set_output(a)
    g = _abi.sized(_abi.Gradients)
    keys = a.block_table_width * a.page_size if a.block_table else a.seqlen_k
    g.dout = a.out
    g.dq = _contiguous(a.seqlen_q, a.heads_q, a.head_dim)
    g.dk = _contiguous(keys, a.heads_kv, a.head_dim)
    g.dv = _contiguous(keys, a.heads_kv, a.head_dim_v)
    bias = arrays.get("bias")
    if bias is not None:
        batch, heads, rows, columns = bias.shape
        g.dbias = _PLACEHOLDER_ADDRESS
        g.dbias_rows, g.dbias_keys = rows, columns
        steps = (heads * rows * columns, rows * columns, columns, 1)
        dbias = _describe.View(_PLACEHOLDER_ADDRESS, (batch, heads, rows, columns), steps)
        strides = _describe.bias_strides(dbias)
        g.dbias_stride_batch, g.dbias_stride_head, g.dbias_stride_row = strides
    g.dsinks = _PLACEHOLDER_ADDRESS if a.sinks else None
    g.dscale = _PLACEHOLDER_ADDRESS
    return g


def _tangents(a: Any, arrays: dict[str, Any]) -> Any:
    """The struct of all tangents, at addresses that are not read."""
    _set_output(a)
    t = _abi.sized(_abi.Tangents)
    t.q, t.k, t.v, t.out, t.dout = a.q, a.k, a.v, a.out, a.out
    t.lse = t.dlse = _PLACEHOLDER_ADDRESS
    t.lse_stride_batch = t.dlse_stride_batch = a.lse_stride_batch
    t.lse_stride_head = t.dlse_stride_head = a.lse_stride_head
    if arrays.get("bias") is not None:
        t.bias = _PLACEHOLDER_ADDRESS
        for name in ("batch", "head", "row"):
            setattr(t, f"bias_stride_{name}", getattr(a, f"bias_stride_{name}"))
    t.sinks = _PLACEHOLDER_ADDRESS if a.sinks else None
    t.scale = _PLACEHOLDER_ADDRESS
    return t


def _plan(a: Any, gradients: Any, tangents: Any = None) -> Plan | str:
    _set_output(a)
    try:
        info = _describe.plan(c_library(), a, gradients, tangents)
    except NotImplementedError as reason:
        return str(reason)
    return Plan(
        kernel=info.kernel.decode(),
        why=info.why.decode(),
        tile_q=info.tile_q,
        tile_k=info.tile_k,
        splits=info.splits,
        threads=info.threads,
        workspace_bytes=info.workspace_bytes,
    )


def _mask_text(mask: Any, a: Any) -> str:
    """The tiles of the mask, reduced by the band if all sequences have the same lengths."""
    from ._block_lists import FULL, PARTIAL, reduced_by_band

    if a.cu_seqlens_q or a.block_table or a.seqused_k or a.leftpad_k:
        grid, whose = mask.tiles(*_used_part(mask, a)), "of the mask, without the band"
    else:
        band = a.seqlen_k - a.seqlen_q, a.window_left, a.window_right
        grid = reduced_by_band(mask.tiles(a.seqlen_q, a.seqlen_k), a.seqlen_q, a.seqlen_k, *band)
        whose = "of mask and band"
    full, partial = int((grid == FULL).sum()), int((grid == PARTIAL).sum())
    skipped = grid.size - full - partial
    return (
        f"{grid.size} tile{'' if grid.size == 1 else 's'} of 128 x 128 {whose}: {skipped} skipped, "
        f"{full} full, {partial} partial"
    )


def _used_part(mask: Any, a: Any) -> tuple[int | None, int | None]:
    """The rows and keys of a mask of ranges, which may go far beyond those of any sequence."""
    from .masks import Ranges

    if not isinstance(mask, Ranges):
        return None, None
    rows, keys = mask._shape(None, None)
    capacity = a.block_table_width * a.page_size if a.block_table else a.seqlen_k
    longest = a.max_seqlen_q or a.seqlen_q, a.max_seqlen_k or capacity
    return min(rows, longest[0]), min(keys, longest[1])


def _sentence(a: Any) -> str:
    """The problem in words: dtype, device, sizes and the options that are on."""
    float8 = _abi.DTYPES["float8_e4m3fn"]
    options = {
        "causal": a.window_right == 0 and a.window_left < 0,
        f"window ({a.window_left}, {a.window_right})": a.window_left >= 0 or a.window_right > 0,
        f"softcap {a.softcap:g}": a.softcap > 0,
        "bias": bool(a.bias),
        "ALiBi": bool(a.alibi_slopes),
        "sinks": bool(a.sinks),
        f"dropout {a.dropout_p:g}": a.dropout_p > 0,
        "variable length": bool(a.cu_seqlens_q),
        "keys in use per sequence": bool(a.seqused_k),
        "left padding": bool(a.leftpad_k),
        "cache rows by index": bool(a.kv_batch_idx),
        f"pages of {a.page_size}": bool(a.block_table),
        "deterministic": bool(a.deterministic),
        "batch-invariant": bool(a.batch_invariant),
        "keys and values of float8_e4m3": bool(a.kv_float8) and a.dtype != float8,
        "TF32 allowed": bool(a.tf32),
        "mask": bool(a.mask),
        "out in float32": a.out_dtype == _abi.OUT_DTYPES["float32"],
    }
    keys = a.block_table_width * a.page_size if a.block_table else a.seqlen_k
    size = f"batch {a.batch}, {a.seqlen_q} rows x {keys} keys, {a.heads_q} heads"
    size += f" over {a.heads_kv}" if a.heads_kv != a.heads_q else ""
    size += f", head dim {a.head_dim}"
    size += f" and {a.head_dim_v}" if a.head_dim_v != a.head_dim else ""
    on = [name for name, given in options.items() if given]
    return ", ".join([f"{_abi.DTYPE_NAMES[a.dtype]} on {_abi.DEVICE_NAMES[a.device]}", size, *on])
