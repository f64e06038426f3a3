"""The vLLM backend, driven through vLLM's own classes on CPU tensors: `make test-vllm`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_batch import PADDING, Batch

pytest.importorskip("vllm", reason="make test-vllm installs vLLM")
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

import vllm_tilewise.attention as ours

NAME = "layers.0.attention"


@pytest.fixture(scope="module")
def backend() -> Any:
    """The class that vLLM finds through the entry point of the installed package."""
    load_general_plugins()
    return AttentionBackendEnum.CUSTOM.get_class()


class Driver:
    """One layer of vLLM with our backend, its cache and the metadata of a batch."""

    def __init__(
        self,
        backend: Any,
        batch: Batch,
        layout: KVCacheLayout = KVCacheLayout.LBNHC,
        cache: str = "auto",
        **options: Any,
    ) -> None:
        self.batch, self.count = batch, sum(batch.new)
        self.config = VllmConfig(device_config=DeviceConfig("cpu"))
        self.cache_config = CacheConfig(block_size=batch.page_size, cache_dtype=cache)
        before = torch.get_default_dtype()
        torch.set_default_dtype(batch.dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layer = Attention(
                    batch.heads, batch.dim, batch.dim**-0.5, batch.kv_heads, prefix=NAME,
                    cache_config=self.cache_config, attn_backend=backend, **options,
                )  # fmt: skip
        finally:
            torch.set_default_dtype(before)
        stored = torch.uint8 if cache.startswith("fp8") else batch.dtype
        spec = FullAttentionSpec(
            block_size=batch.page_size, num_kv_heads=batch.kv_heads, head_size=batch.dim,
            dtype=stored,
        )  # fmt: skip
        shape = (batch.pages, spec.num_heads, spec.block_size, 2 * batch.dim)
        self.layer.kv_cache = torch.empty_permuted(shape, layout.layer_view_order, dtype=stored)
        self.layer.kv_cache.fill_(127 if stored == torch.uint8 else torch.nan)  # NaN in both
        self.builder = backend.get_builder_cls()(spec, [NAME], self.config, torch.device("cpu"))

    def common(self, **changes: Any) -> CommonAttentionMetadata:
        starts = torch.tensor(self.batch.starts(self.batch.new), dtype=torch.int32)
        lengths = torch.tensor(self.batch.lengths, dtype=torch.int32)
        given = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
            num_reqs=len(self.batch.new), num_actual_tokens=self.count,
            max_query_len=max(self.batch.new), max_seq_len=4096,
            block_table_tensor=self.batch.table, slot_mapping=self.slots(),
            seq_lens_cpu_upper_bound=lengths,
        )  # fmt: skip
        return replace(given, **changes)

    def slots(self) -> Tensor:
        return torch.cat([self.batch.of(new=True)[0], torch.full((PADDING,), -1)])

    def fill(self) -> None:
        """Stores what earlier steps would have stored."""
        slots, k, v = self.batch.of(new=False)
        self.layer.impl.do_kv_cache_update(self.layer, k, v, self.layer.kv_cache, slots)

    def step(self, **changes: Any) -> Tensor:
        """vLLM's layer writes the new tokens to the cache and attends."""
        metadata = self.builder.build(0, self.common(**changes))
        _, k, v = self.batch.of(new=True)
        q, k, v = (self.batch.padded(x).flatten(1) for x in (self.batch.q, k, v))
        with set_forward_context({NAME: metadata}, self.config, slot_mapping={NAME: self.slots()}):
            return self.layer(q, k, v)


def test_registration(backend):
    assert backend.__module__ == "vllm_tilewise.backend"
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    assert AttentionBackendEnum.CUSTOM.get_path() == "vllm_tilewise.backend.TilewiseBackend"
    support = backend.get_builder_cls().get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


ORDINARY = dict(
    head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False,
    has_sink=False, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
    device_capability=DeviceCapability(9, 0), attn_type=AttentionType.DECODER,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(), None),
        (dict(head_size=512, dtype=torch.float16, block_size=48), None),
        (dict(kv_cache_dtype="fp8", use_per_head_quant_scales=True), None),
        (dict(has_sink=True, has_sliding_window=True, use_batch_invariant=True), None),
        (dict(use_dcp=True, use_non_causal=True, attn_type=AttentionType.ENCODER_ONLY), None),
        (dict(device_capability=DeviceCapability(7, 5)), None),
        (dict(device_capability=DeviceCapability(7, 0)), "compute capability"),
        (dict(head_size=520), "head_size"),
        (dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype"),
        (dict(kv_cache_dtype="nvfp4"), "kv_cache_dtype"),
        (dict(block_size=8), "block_size"),
        (dict(use_mla=True), "MLA"),
        (dict(use_sparse=True), "sparse"),
        (dict(use_mm_prefix=True), "multimodal"),
        (dict(use_pcp=True), "PCP"),
        (dict(use_rswa=True), "R-SWA"),
        (dict(kv_cache_dtype="bfloat16"), None),
        (dict(kv_cache_dtype="float16"), "needs a model of that type"),
        (dict(kv_cache_dtype="fp8", dtype=torch.float32), "needs a 16-bit model"),
    ],
)
def test_validate_configuration(backend, changes, reason):
    reasons = backend.validate_configuration(**{**ORDINARY, **changes})
    assert (reason is None and not reasons) or reason in " ".join(reasons)


SLOPES = [0.5, 0.25, 0.125, 0.0625]
SINKS = [0.3, -1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(), dict()),
        (dict(per_layer_sliding_window=10), dict(window=(9, 0))),
        (dict(logits_soft_cap=3.0), dict(softcap=3.0)),
        (dict(alibi_slopes=SLOPES), dict(slopes=np.array([SLOPES] * 5))),
        (dict(sinks=torch.tensor(SINKS)), dict(sinks=np.array(SINKS))),
    ],
    ids=["plain", "window", "softcap", "alibi", "sinks"],
)
def test_mixed_batch(backend, options, wanted):
    driver = Driver(backend, Batch(), **options)
    driver.fill()
    driver.batch.check(driver.step(), driver.batch.expected(**wanted))


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLNHC])
def test_cache_layouts(backend, layout):
    driver = Driver(backend, Batch(page_size=32), layout)
    driver.fill()
    driver.batch.check(driver.step(), driver.batch.expected())


def test_decode_only_and_not_causal(backend):
    driver = Driver(backend, Batch(context=(5, 40, 16), new=(1, 1, 1)))
    driver.fill()
    driver.batch.check(driver.step(), driver.batch.expected())
    driver = Driver(backend, Batch(), per_layer_sliding_window=10)
    driver.fill()
    out = driver.step(causal=False)
    driver.batch.check(out, driver.batch.expected(False, window=(9, 9)))
    with pytest.raises(ValueError, match="causal differs from request to request"):
        driver.step(causal=torch.ones(5, dtype=torch.int32))


@pytest.mark.parametrize("per_head", [False, True])
def test_float8_cache(backend, per_head):
    batch = Batch(dtype=torch.bfloat16)
    driver = Driver(backend, batch, cache="fp8")
    scales = torch.tensor([0.02, 0.05]) if per_head else torch.tensor(0.03)
    driver.layer._k_scale = driver.layer._v_scale = scales
    driver.fill()
    out = driver.step()
    # The reference reads what the cache holds.
    factor = scales.reshape(-1, 1)
    for name in ("k", "v"):
        scaled = (getattr(batch, name).float() / factor).to(torch.float8_e4m3fn)
        setattr(batch, name, scaled.float() * factor)
    plain = replace(batch)
    plain.q, plain.k, plain.v = batch.q, batch.k.bfloat16(), batch.v.bfloat16()
    batch.check(out, batch.expected(), plain.plain())


def test_batch_invariance(backend, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    driver = Driver(backend, Batch())
    driver.fill()
    whole = driver.step()
    driver.batch.check(whole, driver.batch.expected())
    for b, first in enumerate(driver.batch.starts(driver.batch.new)[:-1]):
        count = driver.batch.new[b]
        metadata = driver.builder.build(
            0,
            driver.common(
                query_start_loc=torch.tensor([0, count], dtype=torch.int32),
                seq_lens=driver.common().seq_lens[b : b + 1],
                num_reqs=1,
                num_actual_tokens=count,
                block_table_tensor=driver.batch.table[b : b + 1],
            ),
        )
        q = driver.batch.q[first : first + count]
        out = torch.empty_like(q)
        driver.layer.impl.forward(driver.layer, q, q, q, driver.layer.kv_cache, metadata, out)
        assert torch.equal(out.flatten(1), whole[first : first + count])


def test_encoder(backend):
    batch = Batch(context=(0, 0, 0), new=(7, 1, 20))
    driver = Driver(backend, batch, attn_type=AttentionType.ENCODER_ONLY)
    batch.check(driver.step(), batch.expected(False))


def test_profile_run_and_quantised_output(backend):
    driver = Driver(backend, Batch())
    q = torch.randn(9, 4, 32)
    out = torch.full_like(q, torch.nan)
    arguments = (driver.layer, q, q, q, driver.layer.kv_cache, None, out)
    assert driver.layer.impl.forward(*arguments) is out and not out.any()
    with pytest.raises(NotImplementedError, match="quantise"):
        driver.layer.impl.forward(*arguments, output_scale=torch.ones(1))


class Ranks:
    """The group of all ranks as one of them sees it: what the others would send is known."""

    def __init__(self, q: Tensor, contexts: list[tuple[Tensor, Tensor]]) -> None:
        self.q, self.contexts = q, contexts

    def all_gather(self, q: Tensor, dim: int) -> Tensor:
        assert dim == 1 and q.shape[1] == self.q.shape[1] // 2
        return self.q


def test_decode_context_parallelism(backend, monkeypatch):
    """Two ranks with half of the heads and half of the cached tokens each, one after the other.

    vLLM's combination of the ranks' results is a Triton kernel for GPUs; here a few lines of
    PyTorch take its place.
    """
    batch = Batch(kv_heads=1)
    driver = Driver(backend, batch)
    impl = driver.layer.impl
    contexts: list[tuple[Tensor, Tensor]] = []
    combine_of: dict[int, Any] = {}

    def combine(out: Tensor, lse: Tensor, group: Any, return_lse: bool) -> Any:
        assert return_lse
        contexts.append((out, lse))
        outs, lses = (torch.stack(x) for x in zip(*group.contexts, strict=True))
        total = lses.logsumexp(0)
        weight = (lses - total.nan_to_num(neginf=0.0)).exp().unsqueeze(-1)
        half = slice(2 * combine_of["rank"], 2 * combine_of["rank"] + 2)
        return (outs * weight).sum(0)[:, half], total[:, half]

    impl._combine, impl.dcp_world_size = combine, 2
    driver.builder.dcp_world_size = 2
    driver.builder._local_context_lens = torch.zeros(8, dtype=torch.int32)
    _, k, v = batch.of(new=False)
    _, new_k, new_v = batch.of(new=True)

    def rank(r: int, group: Ranks) -> Tensor:
        """The output of rank r, which stores the tokens at positions r, r + 2, r + 4, ..."""
        driver.layer.kv_cache.fill_(torch.nan)
        positions = torch.cat([torch.arange(c) for c in batch.context])
        requests = torch.repeat_interleave(torch.arange(5), torch.tensor(batch.context))
        stored = positions % 2 == r
        local = positions[stored] // 2
        pages = batch.table[requests[stored], local // batch.page_size]
        impl.do_kv_cache_update(
            driver.layer, k[stored], v[stored], driver.layer.kv_cache,
            pages.long() * batch.page_size + local % batch.page_size,
        )  # fmt: skip
        driver.builder.dcp_rank = combine_of["rank"] = r
        monkeypatch.setattr(ours, "get_dcp_group", lambda: group)
        q = batch.q[:, 2 * r : 2 * r + 2]
        out = torch.empty(q.shape)
        metadata = driver.builder.build(0, driver.common())
        return impl.forward(driver.layer, q, new_k, new_v, driver.layer.kv_cache, metadata, out)

    nothing = (torch.zeros_like(batch.q), torch.zeros(batch.q.shape[:2]))
    for r in (0, 1):  # a first pass, for what each rank sends: the other's result needs it
        rank(r, Ranks(batch.q, [nothing, nothing]))
    group = Ranks(batch.q, contexts[:2])
    out = torch.cat([rank(0, group), rank(1, group)], 1)
    batch.check(out, batch.expected())


def test_decode_context_parallelism_refuses(backend, monkeypatch):
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_dcp_world_size_and_rank", lambda *_: (2, 0)
    )
    with pytest.raises(NotImplementedError, match="sliding_window, which decode context"):
        ours.TilewiseImpl(4, 32, 0.1, 2, sliding_window=8)
    impl = ours.TilewiseImpl(4, 32, 0.1, 2)
    assert impl.need_to_return_lse_for_decode
