"""Attention modules with the interface of ``flash_attn.modules.mha``."""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilewise.compat._calls import window_of
from tilewise.compat.flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from tilewise.compat.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb


def get_alibi_slopes(nheads):
    """ALiBi slopes (arXiv 2108.12409) as a list of nheads floats.

    For a power of two they are the geometric sequence whose first element and ratio are
    2^(-8 / nheads). For other numbers they are the slopes of the next lower power of two, followed
    by every other slope of the next higher one.
    """

    def geometric(n):
        ratio = 2.0 ** (-8.0 / n)
        return [ratio ** (i + 1) for i in range(n)]

    lower = 2 ** math.floor(math.log2(nheads))
    if lower == nheads:
        return geometric(nheads)
    return geometric(lower) + geometric(2 * lower)[0::2][: nheads - lower]


def _slopes_buffer(module: nn.Module, alibi_slopes) -> None:
    if alibi_slopes is not None and not isinstance(alibi_slopes, torch.Tensor):
        alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
    module.register_buffer("alibi_slopes", alibi_slopes, persistent=False)


class FlashSelfAttention(nn.Module):
    """Attention of a packed qkv.

    Args:
        causal: Whether later keys are hidden.
        softmax_scale: Factor of the scores; None is 1 / sqrt(head_dim).
        attention_dropout: Probability of dropping a weight, applied only in training.
        window_size: (left, right), where -1 means no limit.
        alibi_slopes: [H] or None.
        deterministic: Compute bitwise equal gradients in every run.
    """

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
    ):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        self.deterministic = deterministic
        _slopes_buffer(self, alibi_slopes)

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None):
        """From qkv [B, S, 3, H, D] to [B, S, H, D]; with cu_seqlens [T, 3, H, D] to [T, H, D]."""
        options = dict(
            softmax_scale=self.softmax_scale,
            causal=self.causal if causal is None else causal,
            window_size=self.window_size,
            alibi_slopes=self.alibi_slopes,
            deterministic=self.deterministic,
        )
        dropout_p = self.drop.p if self.training else 0.0
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, dropout_p, **options)
        if max_seqlen is None:
            raise ValueError("max_seqlen is None, but must be given with cu_seqlens")
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p, **options)


class FlashCrossAttention(nn.Module):
    """Attention of q and a packed kv; the arguments are those of ``FlashSelfAttention``."""

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        alibi_slopes=None,
        window_size=(-1, -1),
        deterministic=False,
    ):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        self.deterministic = deterministic
        _slopes_buffer(self, alibi_slopes)

    def forward(
        self,
        q,
        kv,
        causal=None,
        cu_seqlens=None,
        max_seqlen=None,
        cu_seqlens_k=None,
        max_seqlen_k=None,
    ):
        """From q [B, Sq, H, D] and kv [B, Sk, 2, Hkv, D] to q's shape; packed with cu_seqlens."""
        options = dict(
            softmax_scale=self.softmax_scale,
            causal=self.causal if causal is None else causal,
            window_size=self.window_size,
            alibi_slopes=self.alibi_slopes,
            deterministic=self.deterministic,
        )
        dropout_p = self.drop.p if self.training else 0.0
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, dropout_p, **options)
        for name, value in (
            ("max_seqlen", max_seqlen),
            ("cu_seqlens_k", cu_seqlens_k),
            ("max_seqlen_k", max_seqlen_k),
        ):
            if value is None:
                raise ValueError(f"{name} is None, but must be given with cu_seqlens")
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, dropout_p, **options
        )


def _attend_padded(module, q, k, v, causal, key_padding_mask):
    """Attention to the keys where key_padding_mask [B, Sk] is True."""
    import tilewise

    bias = None
    if key_padding_mask is not None:
        hidden = torch.zeros(key_padding_mask.shape, dtype=torch.float32, device=q.device)
        bias = hidden.masked_fill_(~key_padding_mask.bool(), -math.inf)[:, None, None, :]
        bias = bias.expand(-1, q.shape[2], q.shape[1], -1)
    return tilewise.attention(
        q,
        k,
        v,
        causal=module.causal if causal is None else causal,
        scale=module.softmax_scale,
        bias=bias,
        dropout_p=module.drop.p if module.training else 0.0,
    )


class SelfAttention(nn.Module):
    """Attention of a packed qkv with a key padding mask; rows that see no key give 0."""

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(self, qkv, causal=None, key_padding_mask=None):
        """From qkv [B, S, 3, H, D] and key_padding_mask [B, S] bool (True: the key is seen)."""
        q, k, v = qkv.unbind(dim=2)
        return _attend_padded(self, q, k, v, causal, key_padding_mask)


class CrossAttention(nn.Module):
    """Attention of q and a packed kv with a key padding mask."""

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(self, q, kv, causal=None, key_padding_mask=None):
        """From q [B, Sq, H, D], kv [B, Sk, 2, Hkv, D] and key_padding_mask [B, Sk] bool."""
        k, v = kv.unbind(dim=2)
        return _attend_padded(self, q, k, v, causal, key_padding_mask)


class MHA(nn.Module):
    """Multi-head attention with projections, rotary embedding, ALiBi, GQA and a key/value cache.

    Parameters are named as in ``flash_attn`` (``Wqkv``, or ``Wq`` and ``Wkv`` with cross_attn, and
    ``out_proj``), so its checkpoints load. As there, ``use_flash_attn`` decides whether packed
    sequences (cu_seqlens) or a key_padding_mask are accepted, but the kernels are the same.
    ``fused_bias_fc`` has no effect, and ``dwconv`` is refused.
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        num_heads_kv=None,
        cross_attn=False,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        dwconv=False,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        fused_bias_fc=False,
        use_flash_attn=False,
        return_residual=False,
        checkpointing=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if dwconv:
            raise NotImplementedError(
                "dwconv is True, but must be False: convolution of the projections is not supported"
            )
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim is {embed_dim}, but must be a multiple of num_heads, {num_heads}"
            )
        if num_heads % num_heads_kv:
            raise ValueError(
                f"num_heads is {num_heads}, but must be a multiple of num_heads_kv, {num_heads_kv}"
            )
        if cross_attn and rotary_emb_dim:
            raise ValueError(
                f"rotary_emb_dim is {rotary_emb_dim}, but must be 0 with cross_attn=True"
            )
        window_size = window_of(window_size)
        if (use_alibi or window_size != (-1, -1)) and not use_flash_attn:
            raise ValueError(
                f"use_alibi is {use_alibi} and window_size is {window_size}, but without "
                "use_flash_attn=True they must be False and (-1, -1)"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        if rotary_emb_dim:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )
        factory = dict(device=device, dtype=dtype)
        kv_dim = 2 * self.head_dim * num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **factory)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **factory)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **factory)
        self._make_inner(use_alibi, window_size, dropout, softmax_scale, device)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **factory)

    def _make_inner(self, use_alibi, window_size, dropout, softmax_scale, device):
        options = dict(causal=self.causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        if not self.use_flash_attn:
            self.inner_attn = SelfAttention(**options)
            self.inner_cross_attn = CrossAttention(**options)
            return
        slopes = None
        if use_alibi:
            slopes = torch.tensor(get_alibi_slopes(self.num_heads), device=device)
        options |= dict(alibi_slopes=slopes, window_size=window_size)
        self.inner_attn = FlashSelfAttention(**options)
        self.inner_cross_attn = FlashCrossAttention(**options)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        """An uninitialised cache [batch_size, max_seqlen, 2, num_heads_kv, head_dim]."""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        dtype = weight.dtype if dtype is None else dtype
        return torch.empty(shape, dtype=dtype, device=weight.device)

    def forward(
        self,
        x,
        x_kv=None,
        key_padding_mask=None,
        cu_seqlens=None,
        max_seqlen=None,
        mixer_subset=None,
        inference_params=None,
        **kwargs,
    ):
        """Attention of x to itself, or with cross_attn to x_kv.

        Args:
            x: [B, S, embed_dim], or [T, embed_dim] with cu_seqlens.
            x_kv: [B, Sk, embed_dim]; only with cross_attn.
            key_padding_mask: [B, Sk] bool, True where a key is seen; only with
                use_flash_attn=False.
            cu_seqlens: [B + 1] int32, which needs max_seqlen; only with use_flash_attn=True.
            mixer_subset: Index of the rows of x that are queries; only with cross_attn.
            inference_params: An object with ``key_value_memory_dict``, ``max_seqlen``,
                ``max_batch_size``, ``batch_size_offset``, ``seqlen_offset`` and
                ``lengths_per_sample``. Keys and values are appended to the cache of this layer.

        Returns:
            A tensor in the shape of x; with return_residual, the pair of it and x.
        """
        self._check(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        q, kv = self._project(x, x_kv, mixer_subset)
        if inference_params is not None:
            context = self._attend_cache(q, kv, inference_params)
        else:
            if self.rotary_emb_dim:
                q, kv = self._rotate(q, kv, cu_seqlens, max_seqlen)
            if key_padding_mask is not None:
                kwargs = dict(key_padding_mask=key_padding_mask)
            elif cu_seqlens is not None:
                bounds = dict(cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen)
                kwargs = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **bounds)
            else:
                kwargs = {}
            if self.checkpointing:
                context = checkpoint(self.inner_cross_attn, q, kv, use_reentrant=False, **kwargs)
            else:
                context = self.inner_cross_attn(q, kv, **kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _check(self, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference):
        if cu_seqlens is not None:
            if max_seqlen is None:
                raise ValueError("max_seqlen is None, but must be given with cu_seqlens")
            if key_padding_mask is not None:
                raise ValueError("key_padding_mask is given, but must be None with cu_seqlens")
            if not self.use_flash_attn:
                raise ValueError("cu_seqlens is given, but must be None with use_flash_attn=False")
        if key_padding_mask is not None and self.use_flash_attn:
            raise ValueError("key_padding_mask is given, but must be None with use_flash_attn=True")
        refused: list[tuple[str, object, str]] = []
        if inference is not None:
            given = (("cu_seqlens", cu_seqlens), ("key_padding_mask", key_padding_mask))
            refused += [(name, value, "inference_params") for name, value in given]
        if not self.cross_attn:
            given = (("x_kv", x_kv), ("mixer_subset", mixer_subset))
            refused += [(name, value, "cross_attn=False") for name, value in given]
        for name, value, beside in refused:
            if value is not None:
                raise ValueError(f"{name} is given, but must be None with {beside}")

    def _project(self, x, x_kv, mixer_subset):
        """The projections q [..., S, Hq, D] and kv [..., Sk, 2, Hkv, D]."""
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            q, kv = self.Wqkv(x).split(
                (self.embed_dim, 2 * self.num_heads_kv * self.head_dim), dim=-1
            )
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        return q, kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))

    def _rotate(self, q, kv, cu_seqlens, max_seqlen, offset=0):
        if cu_seqlens is None:
            return self.rotary_emb(q, kv, seqlen_offset=offset, max_seqlen=max_seqlen)
        rotary = self.rotary_emb
        cos, sin, cos_k, sin_k = rotary._update_cos_sin_cache(
            max_seqlen, device=q.device, dtype=q.dtype
        )
        options = dict(interleaved=rotary.interleaved, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        k, v = kv.unbind(dim=-3)
        k = apply_rotary_emb(k, cos_k, sin_k, **options)
        return apply_rotary_emb(q, cos, sin, **options), torch.stack((k, v), dim=-3)

    def _attend_cache(self, q, kv, inference_params):
        if self.layer_idx is None:
            raise ValueError("layer_idx is None, but inference_params needs it to find the cache")
        caches = inference_params.key_value_memory_dict
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(
                inference_params.max_batch_size, inference_params.max_seqlen, dtype=kv.dtype
            )
        first = inference_params.batch_size_offset
        cache = caches[self.layer_idx][first : first + q.shape[0]]
        lengths = inference_params.lengths_per_sample
        seqlens = inference_params.seqlen_offset
        if lengths is not None:
            seqlens = lengths[first : first + q.shape[0]]
        options = {}
        if self.rotary_emb_dim and self.rotary_emb.scale_base is not None:
            # XPos scales q and k by different tables, which the fused rotation does not support.
            q, kv = self._rotate(q, kv, None, inference_params.max_seqlen, seqlens)
        elif self.rotary_emb_dim:
            rotary = self.rotary_emb
            tables = rotary._update_cos_sin_cache(
                inference_params.max_seqlen, device=q.device, dtype=q.dtype
            )
            options = dict(
                rotary_cos=tables.cos,
                rotary_sin=tables.sin,
                rotary_interleaved=rotary.interleaved,
            )
        inner = self.inner_cross_attn
        return flash_attn_with_kvcache(
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            kv[:, :, 0],
            kv[:, :, 1],
            cache_seqlens=seqlens,
            softmax_scale=inner.softmax_scale,
            causal=inner.causal,
            window_size=getattr(inner, "window_size", (-1, -1)),
            alibi_slopes=getattr(inner, "alibi_slopes", None),
            **options,
        )
