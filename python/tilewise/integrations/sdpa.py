"""Tilewise as the implementation of PyTorch's operators of flash attention.

    import tilewise.integrations.sdpa
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("tilewise")
    ...  # scaled_dot_product_attention, varlen_attn and nested tensors, forward and backward
    restore_flash_attention_impl()

The import only registers the name (PyTorch 2.11 and newer). Once it is activated, the operators of
PyTorch's flash backend run on Tilewise: ``aten::_scaled_dot_product_flash_attention`` on CUDA, and
``aten::_scaled_dot_product_flash_attention_for_cpu``, including masks, on the CPU. PyTorch still
chooses the backend of a call; ``torch.nn.attention.sdpa_kernel`` limits the choice. PyTorch's own
kernels compute float64 and ``return_debug_mask``.

``aten::_flash_attention_forward`` and its backward run on Tilewise as well, on CUDA and also on the
CPU, where PyTorch has no kernel: ``torch.nn.attention.varlen`` and nested tensors call them.

On CPUs, a bool mask of at least 1024 rows becomes blocks (``tilewise.masks``) where that pays, so
that what it hides is not computed. ``aten::scaled_dot_product_attention`` would turn it into
numbers before it calls the flash backend, so such calls are taken from it. ``masks_on_gpus`` takes
those on GPUs as well.

With dropout, a forward and its backward must run on the same implementation, so the arguments that
only PyTorch's kernels compute need a dropout_p of 0.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise._requirements import require

require("tilewise.integrations.sdpa", "torch")

import torch
from torch import Tensor
from torch.nn import attention as _registry

from tilewise import _ops, _torch
from tilewise._check import MAX_HEAD_DIM, flag, max_head_dim
from tilewise._options import WANT_QKV
from tilewise._request import Request
from tilewise.api import attention
from tilewise.integrations import _bool_masks, _flash_attention
from tilewise.integrations._bool_masks import MIN_ROWS, as_blocks
from tilewise.integrations._masks import as_bias

NAME = "tilewise"

_FLASH_BACKEND = _registry.SDPBackend.FLASH_ATTENTION.value
# PyTorch chooses one of these for a call with a mask on CUDA; its flash backend takes no masks.
_FUSED_ON_CUDA = (
    _FLASH_BACKEND,
    _registry.SDPBackend.EFFICIENT_ATTENTION.value,
    _registry.SDPBackend.CUDNN_ATTENTION.value,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """The options of an operator of the flash backend."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    mask: Tensor | None = None  # added to the scores, or boolean (True: the key is seen)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Attention as ``scaled_dot_product_attention`` defines it, with causality aligned top-left.

    Args:
        query: [batch, heads, rows, head_dim].
        key: [batch, heads_kv, keys, head_dim].
        value: [batch, heads_kv, keys, head_dim].
        call: The options.

    Returns:
        out [batch, heads, rows, head_dim]; lse, float32 [batch, heads, rows]; the seed and offset
        of the dropout bits, int64 [2] (0 without dropout).
    """
    q, k, v, options = _prepared(query, key, value, call)
    out, lse = torch.ops.tilewise.forward(q, k, v, *options)
    state = options.dropout_state
    if state is None:
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
    return _stored(out, query, _by_heads(query)), lse, state


def backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    state: Tensor, call: Call,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) from the arguments and results of ``forward``."""
    q, k, v, options = _prepared(query, key, value, call)
    if options.dropout_p:
        options = options._replace(dropout_state=state.view(torch.int64))
    dout, out = (_ops.contiguous_columns(x.transpose(1, 2)) for x in (dout, out))
    grads = torch.ops.tilewise.backward(
        dout, None, q, k, v, out, lse.contiguous(), *options, WANT_QKV
    )
    dq, dk, dv = (  # PyTorch's gradients on the CPU are always stored rows first
        _stored(grad, x, x.is_cuda and _by_heads(x))
        for grad, x in zip(grads, (query, key, value), strict=False)
    )
    return dq, dk, dv


def _prepared(query: Tensor, key: Tensor, value: Tensor, call: Call) -> _torch.Prepared:
    rows, keys, mask = query.shape[2], key.shape[2], call.mask
    window: tuple[int | None, int | None] = (None, None)
    if call.is_causal:
        if keys > rows:  # no row sees the keys after the last row
            key, value = key[:, :, :rows], value[:, :, :rows]
            if mask is not None and mask.shape[-1] != 1:
                mask = mask[..., :rows]
        window = (None, max(rows - keys, 0))
    bias = as_bias("attn_mask", mask, query)
    request = Request(window=window, scale=call.scale, dropout_p=call.dropout_p, bias=bias)
    if _by_heads(query):  # then PyTorch's output is stored in the same order
        return _torch.prepare_dense(query, key, value, "bhsd", request)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return _torch.prepare_dense(q, k, v, "bshd", request)


def _by_heads(x: Tensor) -> bool:
    """Whether [batch, heads, rows, columns] is stored in this order, and not rows first."""
    return x.stride(1) >= x.stride(2)


def _stored(rows_first: Tensor, like: Tensor, by_heads: bool) -> Tensor:
    """[batch, rows, heads, columns] as [batch, heads, rows, columns], stored in the order of
    PyTorch's own results, which compiled graphs rely on. Rows that only `like` has are 0.
    """
    x = rows_first.transpose(1, 2)
    shape = (*like.shape[:3], x.shape[3])
    order = (0, 1, 2, 3) if by_heads else (0, 2, 1, 3)
    expected = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)
    if x.shape == expected.shape and x.stride() == expected.stride():
        return x
    expected[:, :, x.shape[2] :] = 0
    expected[:, :, : x.shape[2]] = x
    return expected


# --- PyTorch's operators --------------------------------------------------------------------------


def _cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    _return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse, state = forward(query, key, value, Call(dropout_p, is_causal, scale))
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    no_mask = torch.empty(0, dtype=query.dtype, device=query.device)
    lengths = query.shape[2], key.shape[2]
    return out, lse, None, None, *lengths, state.view(torch.uint64), unused, no_mask


def _cuda_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    _cum_seq_q: Tensor | None, _cum_seq_k: Tensor | None, _max_q: int, _max_k: int,
    dropout_p: float, is_causal: bool, philox_seed: Tensor, _philox_offset: Tensor, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = Call(dropout_p, is_causal, scale)
    return backward(grad_out, query, key, value, out, logsumexp, philox_seed, call)


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse, _ = forward(query, key, value, Call(dropout_p, is_causal, scale, attn_mask))
    return out, lse.mT.contiguous().mT


def _cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = Call(dropout_p, is_causal, scale, attn_mask)
    no_state = torch.zeros(2, dtype=torch.int64)  # the CPU operator is never called with dropout
    return backward(grad_out, query, key, value, out, logsumexp, no_state, call)


def _is_wrapped(x: Tensor) -> bool:
    """Whether a graph is traced, torch.func transforms x, or x is a tensor of another library."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    return not plain or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _attention_of_blocks(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention`` with a bool mask that is computed faster as blocks.

    Returns:
        The output; NotImplemented for all other calls, for those that PyTorch would not compute by
        a fused backend, and on CUDA where the caller has disabled the flash backend.
    """
    mask = attn_mask
    if mask is None or mask.dtype != torch.bool or mask.dim() < 2 or mask.shape[-2] < MIN_ROWS:
        return NotImplemented
    if not query.dim() == key.dim() == value.dim() == 4 or key.shape[-2] != value.shape[-2]:
        return NotImplemented
    if dropout_p or is_causal or mask.shape[-2:] != (query.shape[-2], key.shape[-2]):
        return NotImplemented
    head_dims, limit = (query.shape[-1], value.shape[-1]), max_head_dim(query.device.type)
    if min(head_dims) < 1 or max(head_dims) > limit:
        return NotImplemented
    if any(_is_wrapped(x) for x in (query, key, value, mask)):
        return NotImplemented
    if query.is_cuda and not torch.backends.cuda.flash_sdp_enabled():
        return NotImplemented
    choice = torch._fused_sdp_choice(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if choice not in (_FUSED_ON_CUDA if query.is_cuda else (_FLASH_BACKEND,)):
        return NotImplemented
    blocks = as_blocks(mask, query, query.shape[1], max(head_dims))
    if blocks is None:
        return NotImplemented
    if _by_heads(query):
        return attention(query, key, value, scale=scale, mask=blocks, layout="bhsd")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, scale=scale, mask=blocks).transpose(1, 2)


def masks_on_gpus(taken: bool = True) -> None:
    """Whether sparse bool masks on GPUs become blocks as well, from the next activation on.

    It is off by default, because the blocks of a mask are kept until its tensor's version changes,
    and much that writes to a GPU's memory has no version: replayed CUDA graphs (also those of
    ``torch.compile``), collectives, other libraries. Such a write to a mask must be followed by one
    that has: ``mask.logical_or_(False)``, for example.

    In a graph that is captured the mask stays a bias, for PyTorch's own kernels. They must have run
    before, at the latest before this is switched on: cuDNN cannot be initialised in a capture.

    Args:
        taken: ``scaled_dot_product_attention`` converts bool masks of at least 1024 rows where that
            pays, in fp16 and bf16 on GPUs of compute capability 8.0 and higher. It waits for the
            GPU once per mask.

    Raises:
        TypeError: taken is no bool.
    """
    _bool_masks.take_on_gpus(flag("taken", taken))


class Operator(NamedTuple):
    """A replacement of an operator, whose parameters have the names of the schema."""

    keys: tuple[str, ...]  # dispatch keys
    function: Callable[..., Any]  # returns NotImplemented for calls that PyTorch shall compute
    results: int


_FLASH = "_scaled_dot_product_flash_attention"
_VARLEN = "_flash_attention"
_BOTH = ("CUDA", "CPU")
# Either all operators of a group are replaced or none, since a backward takes what its forward
# returns. PyTorch 2.11 has no `_no_dropout_inplace`.
GROUPS: tuple[dict[str, Operator], ...] = (
    {
        _FLASH: Operator(("CUDA",), _cuda_forward, 9),
        f"{_FLASH}_backward": Operator(("CUDA",), _cuda_backward, 3),
    },
    {
        f"{_FLASH}_for_cpu": Operator(("CPU",), _cpu_forward, 2),
        f"{_FLASH}_for_cpu_backward": Operator(("CPU",), _cpu_backward, 3),
    },
    {
        f"{_VARLEN}_forward": Operator(_BOTH, _flash_attention.forward_operator, 5),
        f"{_VARLEN}_backward": Operator(_BOTH, _flash_attention.backward_operator, 3),
        f"{_VARLEN}_forward_no_dropout_inplace": Operator(
            _BOTH, _flash_attention.forward_into_operator, 1
        ),
    },
    {
        "scaled_dot_product_attention": Operator(("AutogradCPU", "CPU"), _attention_of_blocks, 1),
    },
)
_MASKS_ON_GPUS = {
    "scaled_dot_product_attention": Operator(("AutogradCUDA", "CUDA"), _attention_of_blocks, 1),
}


def _parameters(function: Callable[..., Any]) -> tuple[list[str], set[str]]:
    """The names of the positional and of the keyword parameters."""
    given = inspect.signature(function).parameters.values()
    positional = [x.name.lstrip("_") for x in given if x.kind is x.POSITIONAL_OR_KEYWORD]
    return positional, {x.name for x in given if x.kind is x.KEYWORD_ONLY}


def unknown_signature(schema: Any, operator: Operator) -> str | None:
    """Why an operator with this schema cannot be replaced, or None.

    Keywords that only the schema has do not matter here: a call that gives one falls back.
    """
    positional, _ = _parameters(operator.function)
    given = [x.name for x in schema.arguments if not x.kwarg_only]
    if given != positional:
        return f"it takes ({', '.join(given)}), but ({', '.join(positional)}) is known"
    if len(schema.returns) != operator.results:
        return f"it returns {len(schema.returns)} values, but {operator.results} are known"
    return None


def _with_fallback(name: str, ours: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """A kernel that runs ours for calls it supports, else PyTorch's, which may be None."""
    positional, known = _parameters(ours)
    names = {x: i for i, x in enumerate(positional)}
    debug = names.get("return_debug_mask", len(names))
    dropout = names.get("dropout_p", len(names))
    warned = False

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal warned
        tensor = arguments[0]
        head_dim = tensor.shape[-1] if tensor.dim() > 0 else 0
        unknown = sorted(options.keys() - known)
        # A backward does not get these arguments, so it would run here, with other dropout bits.
        debugging = any(arguments[debug : debug + 1])
        of_forward = [*unknown, *(["return_debug_mask"] if debugging else [])]
        limit = max_head_dim(tensor.device.type)
        is_ours = tensor.dtype in _DTYPES and 0 < head_dim <= limit
        if is_ours and not of_forward:
            result = ours(*arguments, **options)
            if result is not NotImplemented:
                return result
            return original.call_boxed(keys, *arguments, **options)
        if is_ours and any(arguments[dropout : dropout + 1]):
            raise NotImplementedError(
                f"aten::{name} is called with dropout_p {arguments[dropout]} and "
                f"{', '.join(of_forward)}, which only PyTorch's kernel computes, and its dropout "
                "has other bits than the backward of Tilewise: dropout_p must be 0"
            )
        if unknown and not warned:
            warned = True
            warnings.warn(
                f"aten::{name} is called with {', '.join(unknown)}, which Tilewise does not know: "
                "PyTorch's own kernel computes such calls",
                stacklevel=2,
            )
        if original is None:
            raise NotImplementedError(
                f"aten::{name} has no kernel of PyTorch for the CPU, and Tilewise computes only "
                f"float32, float16 and bfloat16 with head_dim up to {MAX_HEAD_DIM}, without "
                "return_debug_mask"
            )
        return original.call_boxed(keys, *arguments, **options)

    return kernel


class _Active:
    """The handle that PyTorch's registry holds until another implementation is activated."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        for group in (*GROUPS, *([_MASKS_ON_GPUS] if _bool_masks.taken_on_gpus() else [])):
            present = {x: y for x, y in group.items() if hasattr(torch.ops.aten, x)}
            reasons = {
                name: reason
                for name, operator in present.items()
                if (reason := unknown_signature(_overload(name)._schema, operator))
            }
            for name, reason in reasons.items():
                warnings.warn(
                    f"PyTorch {torch.__version__} keeps its own kernel of aten::{name}: {reason}",
                    stacklevel=2,
                )
            if not reasons:
                for name, operator in present.items():
                    self._replace(name, operator)

    def _replace(self, name: str, operator: Operator) -> None:
        for key in operator.keys:
            original = None
            if any(_has_kernel(name, x) for x in (key, "CompositeImplicitAutograd")):
                original = torch.library.get_kernel(_overload(name), key)
            elif key == "CUDA":
                continue  # this PyTorch has no CUDA
            kernel = _with_fallback(name, operator.function, original)
            with warnings.catch_warnings():  # PyTorch warns of the override, which is intended
                warnings.simplefilter("ignore", UserWarning)
                self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Restores PyTorch's own kernels."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


def _overload(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


def register() -> None:
    """Registers "tilewise" for ``activate_flash_attention_impl``."""
    if not hasattr(_registry, "restore_flash_attention_impl"):
        raise ImportError(
            f"PyTorch {torch.__version__} has no registry of flash attention implementations: "
            "2.11 or newer is needed"
        )
    _registry.register_flash_attention_impl(NAME, register_fn=_Active)


register()
