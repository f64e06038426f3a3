"""Decoding with a key/value cache whose keys are spread over ranks (decode context parallel)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _check, _ops, _torch
from .._cache import CacheLayout, NewKeys
from .._check import Window
from .._kvcache_torch import Checked, checked, run, with_mask
from .._options import out_dtype_of
from .._request import Request
from .agreement import Description, agree, raise_refusals
from .ranks import Ranks, all_gather, eager, largest_of_ranks, ranks_of

if TYPE_CHECKING:  # masks need NumPy
    from .cache_mask import CacheMask


FUNCTION = "attention_with_kvcache"


def merge_parts(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of n disjoint sets of keys, from the results over each set.

    Args:
        out: [n, ..., rows, heads, columns] of any floating-point dtype.
        lse: float32 [n, ..., heads, rows].

    Returns:
        out in float32 and lse, of all keys. Parts are added in their order.
    """
    top = lse.amax(0)
    # An infinite maximum is replaced by 0, so that nothing computes inf - inf. An lse of +inf, from
    # a sink, gets all the weight; a row whose lse is -inf in every part sees no key.
    infinite = top.isinf()
    relative = torch.where(infinite, torch.where(lse == top, 0.0, -math.inf), lse - top)
    weights = relative.exp().masked_fill(top == -math.inf, 0.0)
    total = weights.sum(0)
    shares = (weights / total.clamp_min(torch.finfo(torch.float32).tiny)).transpose(-1, -2)
    merged = torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
    for part, share in zip(out, shares, strict=True):
        # A part without weight may hold anything. A share of NaN is not 0, so NaN stays NaN.
        merged += torch.where(share.unsqueeze(-1) == 0, 0.0, part.float() * share.unsqueeze(-1))
    return merged, torch.where(infinite, top, top + total.log())


@eager
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    *, group: Any = None, mesh: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, block_table: Any = None, causal: bool = False,
    window: Window = (None, None), scale: Any = None, softcap: float = 0.0,
    sinks: Any = None, num_splits: int = 0, return_lse: bool = False, tf32: bool = False,
    check: bool = False, batch_invariant: bool = False, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, mask: Any = None, key_positions: Any = None,
    return_max_logits: bool = False, out_dtype: Any = None,
) -> Any:  # fmt: skip
    """Attention of queries that all ranks have to a cache of which each rank has some keys.

    Each rank calls ``tilewise.attention_with_kvcache`` on its own cache; out and lse of all ranks
    are then gathered and merged in float32. Each rank may have any of the keys, or none. A mask, a
    window and causal calls of several rows need key_positions. There is no ALiBi or rotary
    embedding, so q and new keys must be rotated before the call. There is no gradient.

    Args:
        q: [B, Sq, Hq, D], the same on all ranks.
        k_cache: [cache batch, capacity, Hkv, D], or pages with block_table: this rank's keys.
        v_cache: The values of these keys: the shape of k_cache, with Dv columns.
        k: New keys [B, Snew, Hkv, D] that are appended to the cache of this rank, or None.
        v: The values of the new keys: [B, Snew, Hkv, Dv].
        group: A process group; None is the default group.
        mesh: A DeviceMesh of one dimension, instead of group.
        cache_seqlens: int or integer [B]: keys in the cache of this rank.
        cache_batch_idx: As in ``tilewise.attention_with_kvcache``, like everything below.
        cache_leftpad: integer [B].
        block_table: integer [B, width].
        causal: As in ``tilewise.attention_with_kvcache``: the last query is aligned with the last
            key of all ranks.
        window: The same: (left, right) over the keys of all ranks. With a window, and with causal
            if q has several rows, every call waits for cache_seqlens and the other ranks.
        scale: Factor of q.k.
        softcap: Soft cap of scores.
        sinks: float32 [Hq], the same on all ranks; counted once.
        num_splits: Number of key splits on each rank; 0 chooses it by shape.
        return_lse: Whether lse is returned.
        tf32: Whether float32 operands may be rounded to TF32.
        check: Whether index tensors on a GPU are verified.
        batch_invariant: Compute each sequence as without the others.
        q_descale: float32 [B or 1, Hkv or 1] of q of float8, the same on all ranks.
        k_descale: float32 [B or 1, Hkv or 1] of a float8 cache of this rank.
        v_descale: The same for values.
        mask: One of ``tilewise.masks`` for the keys of all ranks, the same on all ranks, on any
            device. Key 0 is the first key of a sequence after the left padding. The host cuts this
            rank's keys out of it, so a mask on a GPU is copied to the host. With a Tree, every call
            waits for cache_seqlens and the other ranks. ``Blocks`` have as many rows as q; keys
            beyond theirs are hidden.
        key_positions: integer [n] or [B, n], ascending, used only with a mask, causal or a window:
            entry j is the place of this rank's key j among the keys of all ranks. Both count from
            the left padding on, new keys included. n is at least the number of keys that a row of
            the caches, or of block_table, has room for; entries for keys that are not there yet
            have no effect. None means 0, 1, 2 and so on, which is allowed only for a single rank.
        return_max_logits: Whether max_logits is returned.
        out_dtype: As in ``tilewise.attention``, the same on all ranks. It is also the dtype of the
            parts that are merged, so with float32 nothing is rounded.

    Returns:
        out [B, Sq, Hq, Dv] in out_dtype, the same on all ranks; with return_lse also lse, float32
        [B, Hq, Sq]; with return_max_logits also max_logits, float32 [B, Hq].

    Raises:
        NotImplementedError: a transform of torch.func is active, and there are several ranks.
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device, range, or differs between ranks.
        RuntimeError: another rank has stopped, or no kernel can run the problem.
    """
    ranks = ranks_of(group, mesh)
    request = Request(
        scale=scale, softcap=softcap, sinks=sinks, return_lse=return_lse, tf32=tf32,
        batch_invariant=batch_invariant, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, return_max_logits=return_max_logits, out_dtype=out_dtype,
    )  # fmt: skip
    call: Checked | None = None
    spread: CacheMask | None = None

    def describe() -> Description:
        nonlocal call, spread
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"mesh has {mesh.ndim} dimensions, but must have 1")
        on_gpu = _torch.as_array("q", q).is_cuda
        # On a CPU the entries of index tensors are checked as well: if a rank refused them later,
        # the others would have appended.
        checks = _check.flag("check", check) or (k is not None and not on_gpu)
        layout = CacheLayout(cache_batch_idx, cache_leftpad, block_table, num_splits, checks)
        with torch.no_grad():
            call = checked(q, k_cache, v_cache, NewKeys(k, v, cache_seqlens), request, layout)
        bounds = _check.window_bounds(causal, window)
        if bounds == (-1, 0) and q.shape[1] == 1:
            bounds = (-1, -1)  # the only row sees all keys
        if mask is not None or bounds != (-1, -1):
            from .cache_mask import CacheMask, Keys

            keys = k_cache, v_cache, k, cache_seqlens, cache_batch_idx, cache_leftpad, block_table
            spread = CacheMask(mask, bounds, key_positions, q, Keys(*keys), ranks)
        return Description(_same(call, request, spread) | {"window with causal": str(bounds)})

    agree(ranks, FUNCTION, describe)
    assert call is not None
    if ranks.rank > 0:
        call = call._replace(options=call.options._replace(sinks=None))
    out, lse, *max_logits = _attend(ranks, call, spread)
    results = (out, *([lse] if return_lse else []), *max_logits)
    return results if len(results) > 1 else out


def _same(call: Checked, request: Request, spread: CacheMask | None) -> dict[str, str]:
    """The values that must be the same on all ranks, by name."""
    same = {
        "shape of q": str(list(call.q.shape)), "dtype of q": str(call.q.dtype),
        "device": call.q.device.type, "heads of k_cache": str(call.k_cache.shape[2]),
        "head_dim of v_cache": str(call.v_cache.shape[3]),
        "mask": str(None if spread is None else spread.whole),
    }  # fmt: skip
    for name in ("sinks", "q_descale"):
        given = getattr(request, name)
        same[name] = "None" if given is None else f"given with shape {list(given.shape)}"
    scale = request.scale
    same["scale"] = "a tensor" if isinstance(scale, Tensor) else repr(scale)
    for name in ("softcap", "return_lse", "tf32", "batch_invariant", "return_max_logits",
                 "out_dtype"):  # fmt: skip
        same[name] = str(getattr(request, name))
    return same


@torch.no_grad()
def _attend(ranks: Ranks, call: Checked, spread: CacheMask | None) -> list[Tensor]:
    """out, lse and, if requested, max_logits for the keys of all ranks.

    If the call of a rank fails after the checks, the others wait for its part, so it sends NaN and
    then raises its error. On CPUs the others are told and raise as well; on GPUs, whose hosts would
    have to wait for the message to read it, their results are NaN.
    """
    longest = None if spread is None else spread.longest()
    error: Exception | None = None
    try:
        part = None if spread is None else spread.own_part(longest)
        results = list(run(call if part is None else with_mask(call, part)))
    except Exception as failure:  # whatever it is, the other ranks must not wait for this one
        if ranks.world == 1:
            raise
        error, results = failure, _nothing(call)
    if ranks.world == 1:
        return results
    out, lse, *max_logits = results
    outs, lses, failed = _gathered(out, lse, error is not None, ranks)
    if failed:
        raise_refusals(ranks, FUNCTION, error)
    merged, lse = merge_parts(outs, lses)
    max_logits = [largest_of_ranks(x, ranks, "max_logits") for x in max_logits]
    if error is not None:
        raise error
    return [merged.to(out.dtype), lse, *max_logits]


def _nothing(call: Checked) -> list[Tensor]:
    """What a rank without results sends: NaN."""
    batch, rows, heads, _ = call.q.shape
    shapes: list[tuple[int, ...]] = [(batch, heads, rows)]
    if call.forward is _ops.forward_max_logits_alone:
        shapes.append((batch, heads))
    out = torch.full(
        (batch, rows, heads, call.v_cache.shape[3]), math.nan,
        dtype=out_dtype_of(call.q, call.options), device=call.q.device,
    )  # fmt: skip
    return [out, *(out.new_full(shape, math.nan, dtype=torch.float32) for shape in shapes)]


def _gathered(out: Tensor, lse: Tensor, failed: bool, ranks: Ranks) -> tuple[Tensor, Tensor, bool]:
    """Out and lse of all ranks, in one message, and on CPUs whether a rank has failed."""
    own = [x.contiguous().view(-1).view(torch.uint8) for x in (lse, out)]
    sizes = [x.numel() for x in own]
    if not out.is_cuda:
        own.append(torch.tensor([failed], dtype=torch.uint8, device=out.device))
    parts = all_gather(torch.cat(own)[None], [1] * ranks.world, ranks, "out and lse")
    whole = torch.cat(parts)
    # In one dimension, because torch does not change the dtype of an empty tensor of several.
    lses, outs = (x.reshape(-1) for x in (whole[:, : sizes[0]], whole[:, sizes[0] : sum(sizes)]))
    return (
        outs.view(out.dtype).view(ranks.world, *out.shape),
        lses.view(lse.dtype).view(ranks.world, *lse.shape),
        not out.is_cuda and bool(whole[:, -1].any()),
    )
