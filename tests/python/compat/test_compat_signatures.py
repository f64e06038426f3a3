"""The signatures of FlashAttention-2 (2.8) and 3, parameter by parameter.

Callers pass arguments by position and by name, and some ask ``inspect.signature`` for names, so
order, kinds, defaults and annotations have to match as well.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

pytest.importorskip("torch")

SIGNATURES = {
    "tilewise.compat.flash_attn.flash_attn_interface": """
    maybe_contiguous(x)
    round_multiple(x, m)
    _flash_attn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Optional[torch.Tensor], return_softmax: bool) ->
        Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    _flash_attn_varlen_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k:
        int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int=-1,
        window_size_right: int=-1, softcap: float=0.0, alibi_slopes: Optional[torch.Tensor]=None,
        return_softmax: bool=False, block_table: Optional[torch.Tensor]=None, leftpad_k:
        Optional[torch.Tensor]=None, seqused_k: Optional[torch.Tensor]=None, zero_tensors:
        bool=False, num_splits: int=0) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor,
        torch.Tensor]
    _flash_attn_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v:
        torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor, dq: Optional[torch.Tensor],
        dk: Optional[torch.Tensor], dv: Optional[torch.Tensor], dropout_p: float, softmax_scale:
        float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
        alibi_slopes: Optional[torch.Tensor], deterministic: bool, rng_state:
        Optional[torch.Tensor]=None) -> torch.Tensor
    _flash_attn_varlen_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v:
        torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor, dq: Optional[torch.Tensor],
        dk: Optional[torch.Tensor], dv: Optional[torch.Tensor], cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Optional[torch.Tensor], deterministic: bool, rng_state:
        Optional[torch.Tensor]=None, zero_tensors: bool=False) -> torch.Tensor
    flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False)
    flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False)
    flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1,
        -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
    flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False)
    flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)
    flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None)
    flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None,
        rotary_sin=None, cache_seqlens: Optional[Union[int, torch.Tensor]]=None, cache_batch_idx:
        Optional[torch.Tensor]=None, cache_leftpad: Optional[torch.Tensor]=None, block_table:
        Optional[torch.Tensor]=None, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False)
    """,
    "tilewise.compat.flash_attn.bert_padding": """
    IndexFirstAxis.forward(ctx, input, indices)
    IndexPutFirstAxis.forward(ctx, values, indices, first_axis_dim)
    IndexFirstAxisResidual.forward(ctx, input, indices)
    unpad_input(hidden_states, attention_mask, unused_mask=None)
    unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length)
    pad_input(hidden_states, indices, batch, seqlen)
    """,
    "tilewise.compat.flash_attn.layers.rotary": """
    rotate_half(x, interleaved=False)
    apply_rotary_emb_torch(x, cos, sin, interleaved=False)
    ApplyRotaryEmb.forward(ctx, x, cos, sin, interleaved=False, inplace=False, seqlen_offsets:
        Union[int, Tensor]=0, cu_seqlens: Optional[Tensor]=None, max_seqlen: Optional[int]=None)
    apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets: Union[int,
        Tensor]=0, cu_seqlens: Optional[Tensor]=None, max_seqlen: Optional[int]=None)
    ApplyRotaryEmbQKV_.forward(ctx, qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False,
        seqlen_offsets: Union[int, torch.Tensor]=0, num_heads_q: Optional[int]=None)
    apply_rotary_emb_qkv_(qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False,
        seqlen_offsets: Union[int, torch.Tensor]=0, num_heads_q: Optional[int]=None)
    ApplyRotaryEmbKV_.forward(ctx, kv, cos, sin, interleaved=False, seqlen_offsets: Union[int,
        torch.Tensor]=0)
    apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets: Union[int,
        torch.Tensor]=0)
    RotaryEmbedding.__init__(self, dim: int, base=10000.0, interleaved=False, scale_base=None,
        device=None)
    RotaryEmbedding.forward(self, qkv: torch.Tensor, kv: Optional[torch.Tensor]=None,
        seqlen_offset: Union[int, torch.Tensor]=0, max_seqlen: Optional[int]=None, num_heads_q:
        Optional[int]=None)
    """,
    "tilewise.compat.flash_attn.modules.mha": """
    get_alibi_slopes(nheads)
    FlashSelfAttention.__init__(self, causal=False, softmax_scale=None, attention_dropout=0.0,
        window_size=(-1, -1), alibi_slopes=None, deterministic=False)
    FlashSelfAttention.forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None)
    FlashCrossAttention.__init__(self, causal=False, softmax_scale=None,
        attention_dropout=0.0, alibi_slopes=None, window_size=(-1, -1), deterministic=False)
    FlashCrossAttention.forward(self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None,
        cu_seqlens_k=None, max_seqlen_k=None)
    SelfAttention.__init__(self, causal=False, softmax_scale=None, attention_dropout=0.0)
    SelfAttention.forward(self, qkv, causal=None, key_padding_mask=None)
    CrossAttention.__init__(self, causal=False, softmax_scale=None, attention_dropout=0.0)
    CrossAttention.forward(self, q, kv, causal=None, key_padding_mask=None)
    MHA.__init__(self, embed_dim, num_heads, num_heads_kv=None, cross_attn=False,
        qkv_proj_bias=True, out_proj_bias=True, dropout=0.0, softmax_scale=None, causal=False,
        layer_idx=None, dwconv=False, rotary_emb_dim=0, rotary_emb_base=10000.0,
        rotary_emb_scale_base=None, rotary_emb_interleaved=False, use_alibi=False,
        window_size=(-1, -1), fused_bias_fc=False, use_flash_attn=False, return_residual=False,
        checkpointing=False, device=None, dtype=None)
    MHA.allocate_inference_cache(self, batch_size, max_seqlen, dtype=None)
    MHA.forward(self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None,
        mixer_subset=None, inference_params=None, **kwargs)
    """,
    "tilewise.compat.flash_attn.ops.triton.rotary": """
    apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, seqlen_offsets:
        Union[int, torch.Tensor]=0, cu_seqlens: Optional[torch.Tensor]=None, max_seqlen:
        Optional[int]=None, interleaved=False, inplace=False, conjugate=False) -> torch.Tensor
    """,
    "tilewise.compat.flash_attn_interface": """
    maybe_contiguous(x)
    round_multiple(x, m)
    round_up_headdim(head_size: int) -> int
    _flash_attn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_new:
        Optional[torch.Tensor]=None, v_new: Optional[torch.Tensor]=None, qv:
        Optional[torch.Tensor]=None, out_: Optional[torch.Tensor]=None, cu_seqlens_q:
        Optional[torch.Tensor]=None, cu_seqlens_k: Optional[torch.Tensor]=None, cu_seqlens_k_new:
        Optional[torch.Tensor]=None, seqused_q: Optional[torch.Tensor]=None, seqused_k:
        Optional[torch.Tensor]=None, max_seqlen_q: Optional[int]=None, max_seqlen_k:
        Optional[int]=None, page_table: Optional[torch.Tensor]=None, kv_batch_idx:
        Optional[torch.Tensor]=None, leftpad_k: Optional[torch.Tensor]=None, rotary_cos:
        Optional[torch.Tensor]=None, rotary_sin: Optional[torch.Tensor]=None, seqlens_rotary:
        Optional[torch.Tensor]=None, q_descale: Optional[torch.Tensor]=None, k_descale:
        Optional[torch.Tensor]=None, v_descale: Optional[torch.Tensor]=None, softmax_scale:
        Optional[float]=None, causal: bool=False, window_size_left: int=-1, window_size_right:
        int=-1, attention_chunk: int=0, softcap: float=0.0, rotary_interleaved: bool=True,
        scheduler_metadata: Optional[torch.Tensor]=None, num_splits: int=1, pack_gqa:
        Optional[bool]=None, sm_margin: int=0) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor,
        torch.Tensor]
    _flash_attn_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v:
        torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor, cu_seqlens_q:
        Optional[torch.Tensor]=None, cu_seqlens_k: Optional[torch.Tensor]=None, sequed_q:
        Optional[torch.Tensor]=None, sequed_k: Optional[torch.Tensor]=None, max_seqlen_q:
        Optional[int]=None, max_seqlen_k: Optional[int]=None, dq: Optional[torch.Tensor]=None, dk:
        Optional[torch.Tensor]=None, dv: Optional[torch.Tensor]=None, softmax_scale:
        Optional[float]=None, is_causal: bool=False, window_size_left: int=-1, window_size_right:
        int=-1, softcap: float=0.0, deterministic: bool=False, sm_margin: int=0) -> torch.Tensor
    flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None,
        k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False)
    flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None,
        k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
    flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None,
        k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)
    flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None)
    flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None,
        rotary_sin=None, cache_seqlens: Optional[Union[int, torch.Tensor]]=None, cache_batch_idx:
        Optional[torch.Tensor]=None, cache_leftpad: Optional[torch.Tensor]=None, page_table:
        Optional[torch.Tensor]=None, cu_seqlens_q: Optional[torch.Tensor]=None, cu_seqlens_k_new:
        Optional[torch.Tensor]=None, max_seqlen_q: Optional[int]=None, rotary_seqlens:
        Optional[torch.Tensor]=None, q_descale: Optional[torch.Tensor]=None, k_descale:
        Optional[torch.Tensor]=None, v_descale: Optional[torch.Tensor]=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
        sm_margin=0, return_softmax_lse=False)
    get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv,
        headdim, cache_seqlens: torch.Tensor, qkv_dtype=torch.bfloat16, headdim_v=None,
        cu_seqlens_q: Optional[torch.Tensor]=None, cu_seqlens_k_new: Optional[torch.Tensor]=None,
        cache_leftpad: Optional[torch.Tensor]=None, page_size: Optional[int]=None,
        max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0,
        has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)
    """,
}


def entries():
    """(module, name, parameters and result) from the tables, where continued lines are indented."""
    for module, text in SIGNATURES.items():
        joined = []
        for line in text.strip("\n").splitlines():
            if line.startswith("     "):
                joined[-1] += " " + line.strip()
            elif line.strip():
                joined.append(line.strip())
        for line in joined:
            name, _, rest = line.partition("(")
            yield module, name, "(" + rest


def parameters(function: ast.FunctionDef):
    """Names, kinds, defaults and annotations as one comparable list."""
    arguments = function.args
    names = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(names) - len(arguments.defaults)) + list(arguments.defaults)
    described = [
        (x.arg, d and ast.unparse(d), x.annotation and ast.unparse(x.annotation))
        for x, d in zip(names, defaults, strict=True)
    ]
    rest = (arguments.vararg, arguments.kwarg)
    described += [x and x.arg for x in rest] + [x.arg for x in arguments.kwonlyargs]
    returns = function.returns and ast.unparse(function.returns)
    # One spelling differs: typing.Tuple, which is deprecated, means the same as tuple.
    return [*described, returns and returns.replace("Tuple[", "tuple[")]


def described(signature: inspect.Signature):
    """The same list, from a signature (annotations are strings, because the modules postpone
    them)."""
    listed, vararg, kwarg, kwonly = [], None, None, []
    for x in signature.parameters.values():
        if x.kind is x.VAR_POSITIONAL:
            vararg = x.name
        elif x.kind is x.VAR_KEYWORD:
            kwarg = x.name
        elif x.kind is x.KEYWORD_ONLY:
            kwonly.append(x.name)
        else:
            default = None if x.default is x.empty else ast.unparse(ast.parse(source_of(x.default)))
            listed.append((x.name, default, annotation(x.annotation)))
    return [*listed, vararg, kwarg, *kwonly, annotation(signature.return_annotation)]


def source_of(default) -> str:
    return str(default) if type(default).__module__ == "torch" else repr(default)


def annotation(given):
    return None if given is inspect.Signature.empty else ast.unparse(ast.parse(given))


@pytest.mark.parametrize(("module", "name", "wanted"), list(entries()))
def test_signature(module, name, wanted):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function = ast.parse(f"def f{wanted}: pass").body[0]
    assert described(inspect.signature(found)) == parameters(function)


def test_package_exports_the_seven_functions():
    import tilewise.compat.flash_attn as package

    names = [name for name in package.__all__ if name.startswith("flash_attn_")]
    assert len(names) == 7
    for name in names:
        assert callable(getattr(package, name))
    assert tuple(int(x) for x in package.__version__.split(".")) >= (2, 8)


def test_aliases():
    from tilewise.compat.flash_attn import bert_padding
    from tilewise.compat.flash_attn.layers import rotary

    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb
    for name in ("index_first_axis", "index_put_first_axis", "index_first_axis_residual"):
        assert callable(getattr(bert_padding, name))


def test_modules_are_attributes():
    code = "import tilewise; tilewise.compat.flash_attn.flash_attn_func; "
    code += "tilewise.compat.flash_attn_interface.flash_attn_combine; "
    code += "assert not hasattr(tilewise.compat, 'flash_attn_4')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
