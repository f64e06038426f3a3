"""The SGLang backend, driven through SGLang's own classes on CPU tensors: `make test-sglang`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchvision_without_cuda  # noqa: F401 - before SGLang, which imports torchvision
from paged_batch import PADDING, Batch

pytest.importorskip("sglang", reason="make test-sglang installs SGLang")
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

CONTEXT = 64
DECODING = dict(context=(5, 40, 16), new=(1, 1, 1))


@pytest.fixture(scope="module")
def create() -> Any:
    """The function that SGLang finds through the entry point of the installed package."""
    load_plugins()
    return ATTENTION_BACKENDS["tilewise"]


class Driver:
    """One layer of SGLang with our backend, its pools and a batch."""

    def __init__(
        self, create: Any, batch: Batch, pool: Any = None, dtype: Any = None, **options: Any
    ) -> None:
        self.batch = batch
        size = batch.page_size
        self.pool = pool or MHATokenToKVPool(
            (batch.pages - 1) * size, size, dtype or batch.dtype, batch.kv_heads, batch.dim, 1,
            "cpu", False,
        )  # fmt: skip
        for sub in (getattr(self.pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")):
            self._poison(sub)
        self._poison(self.pool)
        requests = ReqToTokenPool(8, CONTEXT, "cpu", False)
        self.rows = torch.tensor([3, 1, 7, 2, 5][: len(batch.new)])
        for b, length in enumerate(batch.lengths):
            at = torch.arange(length)
            slots = batch.table[b, at // size] * size + at % size
            requests.req_to_token[self.rows[b], :length] = slots.int()
        self.runner = SimpleNamespace(
            use_mla_backend=False, device="cpu", page_size=size, req_to_token_pool=requests,
            token_to_kv_pool=self.pool, server_args=SimpleNamespace(speculative_algorithm=None),
            model_config=SimpleNamespace(context_len=CONTEXT),
        )  # fmt: skip
        self.backend = create(self.runner)
        self.layer = RadixAttention(
            batch.heads, batch.dim, batch.dim**-0.5, batch.kv_heads, 0, **options
        )

    @staticmethod
    def _poison(pool: Any) -> None:
        for buffer in [*(getattr(pool, "k_buffer", ())), *(getattr(pool, "v_buffer", ()))]:
            buffer.fill_(127 if buffer.dtype == torch.uint8 else torch.nan)

    def forward_batch(self, **changes: Any) -> ForwardBatch:
        lengths, new = torch.tensor(self.batch.lengths), torch.tensor(self.batch.new)
        given = ForwardBatch(
            forward_mode=ForwardMode.DECODE if max(self.batch.new) == 1 else ForwardMode.MIXED,
            batch_size=len(new), input_ids=torch.zeros(int(new.sum()), dtype=torch.int64),
            req_pool_indices=self.rows, seq_lens=lengths, seq_lens_cpu=lengths,
            out_cache_loc=self.batch.of(new=True)[0], seq_lens_sum=int(lengths.sum()),
            extend_seq_lens=new, extend_seq_lens_cpu=new.tolist(),
            extend_prefix_lens=lengths - new, extend_prefix_lens_cpu=list(self.batch.context),
        )  # fmt: skip
        return replace(given, **changes)

    def step(self, fill: bool = True, padding: bool = False, **options: Any) -> Tensor:
        """SGLang's layer stores the new tokens and attends."""
        if fill:
            slots, k, v = self.batch.of(new=False)
            scales = (self.layer.k_scale, self.layer.v_scale)
            self.pool.set_kv_buffer(self.layer, slots, k, v, *scales)
        batch = self.forward_batch()
        self.backend.init_forward_metadata(batch)
        return self.attend(batch, padding, **options)

    def attend(self, batch: ForwardBatch, padding: bool = False, **options: Any) -> Tensor:
        _, k, v = self.batch.of(new=True)
        q = self.batch.padded(self.batch.q) if padding else self.batch.q
        with forward_context(ForwardContext(attn_backend=self.backend)):
            return self.layer(q.flatten(1), k.flatten(1), v.flatten(1), batch, **options)


def test_registration(create):
    assert create.__module__ == "sglang_tilewise"
    assert "tilewise" in ATTENTION_BACKEND_CHOICES


SINKS = [0.3, -1.0, 2.0, 0.0]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_mixed_batch_and_page_sizes(create, page_size):
    driver = Driver(create, Batch(page_size=page_size))
    out = driver.step(padding=True)
    assert out.shape[0] == sum(driver.batch.new) + PADDING
    driver.batch.check(out, driver.batch.expected())


@pytest.mark.parametrize("page_size", [1, 16])
def test_decode(create, page_size):
    driver = Driver(create, Batch(page_size=page_size, **DECODING))
    driver.batch.check(driver.step(), driver.batch.expected())


@pytest.mark.parametrize(
    ("layer", "call", "wanted"),
    [
        (dict(sliding_window_size=9), dict(), dict(window=(9, 0))),
        (dict(logit_cap=3.0), dict(), dict(softcap=3.0)),
        (dict(), dict(sinks=torch.tensor(SINKS)), dict(sinks=np.array(SINKS))),
        (dict(attn_type=AttentionType.ENCODER_ONLY), dict(), dict(causal=False)),
    ],
    ids=["window", "softcap", "sinks", "bidirectional"],
)
def test_options(create, layer, call, wanted):
    driver = Driver(create, Batch(), **layer)
    driver.batch.check(driver.step(**call), driver.batch.expected(**wanted))


def test_float8_pool(create):
    batch = Batch(dtype=torch.bfloat16)
    driver = Driver(create, batch, dtype=torch.float8_e4m3fn)
    driver.layer.k_scale = driver.layer.v_scale = scale = torch.tensor(0.03)
    batch.k, batch.v = (  # SGLang divides the new keys and values in place
        ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale) for x in (batch.k, batch.v)
    )
    stored = replace(batch)
    stored.q, stored.k, stored.v = batch.q, batch.k.bfloat16(), batch.v.bfloat16()
    batch.k, batch.v = stored.k.clone(), stored.v.clone()
    out = driver.step()
    driver.batch.check(out, stored.expected(), stored.plain())


def test_window_layers_with_a_pool_of_their_own(create):
    batch = Batch()
    size = (batch.pages - 1) * batch.page_size
    pool = SWAKVPool(
        size=size, size_swa=size, page_size=batch.page_size, dtype=batch.dtype,
        head_num=batch.kv_heads, head_dim=batch.dim, swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1], device="cpu",
    )  # fmt: skip
    moved = torch.cat([torch.arange(batch.page_size), torch.arange(size).flip(0) + batch.page_size])
    pages = moved.view(-1, batch.page_size).flip(1)  # pages in another order, rows as they were
    pages[0] = torch.arange(batch.page_size)
    pool.full_to_swa_index_mapping = torch.cat([pages.flatten(), torch.tensor([-1])])
    driver = Driver(create, batch, pool, sliding_window_size=9)
    slots, k, v = batch.of(new=False)
    pool.swa_kv_pool.set_kv_buffer(driver.layer, pool.full_to_swa_index_mapping[slots], k, v)
    out = driver.step(fill=False)
    batch.check(out, batch.expected(window=(9, 0)))


def test_cuda_graph_tensors_keep_their_addresses(create):
    """The calls around a capture and a replay; the graph itself needs a GPU."""
    batch = Batch(**DECODING)
    driver = Driver(create, batch)
    assert driver.backend.get_cuda_graph_seq_len_fill_value() == 1
    driver.backend.init_cuda_graph_state(8, 8)
    short = driver.forward_batch(
        seq_lens=torch.ones(3, dtype=torch.int64), seq_lens_cpu=torch.ones(3, dtype=torch.int64)
    )
    driver.backend.init_forward_metadata_out_graph(short, in_capture=True)
    captured = driver.backend.forward_metadata
    driver.backend.init_forward_metadata_out_graph(driver.forward_batch())
    replayed = driver.backend.forward_metadata
    for name in ("cu_seqlens", "lengths", "table"):
        assert getattr(captured, name).data_ptr() == getattr(replayed, name).data_ptr()
    assert captured.longest_keys == replayed.longest_keys == CONTEXT
    slots, k, v = batch.of(new=False)
    driver.pool.set_kv_buffer(driver.layer, slots, k, v)
    driver.backend.forward_metadata = captured
    batch.check(driver.attend(driver.forward_batch()), batch.expected())
    with pytest.raises(NotImplementedError, match="forward_mode is MIXED"):
        driver.backend.init_forward_metadata_out_graph(
            driver.forward_batch(forward_mode=ForwardMode.MIXED)
        )


def test_refusals(create):
    driver = Driver(create, Batch())
    for changes, sentence in (
        (dict(forward_mode=ForwardMode.TARGET_VERIFY), "forward_mode is TARGET_VERIFY"),
        (dict(encoder_lens=torch.ones(5)), "encoder-decoder"),
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            driver.backend.init_forward_metadata(driver.forward_batch(**changes))
    model = SimpleNamespace(prepare_attn_masks=lambda *_: None)
    masking = create(SimpleNamespace(**vars(driver.runner), model=model))
    image = SimpleNamespace(contains_image_inputs=lambda: True)
    extend = dict(forward_mode=ForwardMode.EXTEND)
    masking.init_forward_metadata(driver.forward_batch(**extend, mm_inputs=[None] * 5))
    with pytest.raises(NotImplementedError, match="a request contains an image"):
        masking.init_forward_metadata(driver.forward_batch(**extend, mm_inputs=[image] * 5))
    driver.backend.init_forward_metadata(driver.forward_batch(**extend, mm_inputs=[image] * 5))
    with pytest.raises(NotImplementedError, match="q_rope is given"):
        driver.step(q_rope=torch.ones(1))
    for changes, sentence in (
        (dict(use_mla_backend=True), "MLA"),
        (dict(server_args=SimpleNamespace(speculative_algorithm="EAGLE")), "speculative"),
        (dict(server_args=SimpleNamespace(attn_cp_size=2)), "attn_cp_size is 2, but"),
        (dict(server_args=SimpleNamespace(dcp_size=4)), "dcp_size is 4, but"),
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            create(SimpleNamespace(**{**vars(driver.runner), **changes}))
