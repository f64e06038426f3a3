"""Training and compilation through Transformers: checkpointing, torch.compile, Trainer,
encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import devices
import hf_models

hf_models.require("transformers>=5.20", "accelerate")

import tilewise.hf  # noqa: E402, F401
from tilewise import _ops  # noqa: E402

pytestmark = hf_models.MARKS
TOLERANCE = 1e-5  # of the largest number; measured: 1e-6


def loss_and_gradients(model: Any, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), hf_models.gradients(model)


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "hole"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_dropout_only_while_training(
    kind: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "llama":
        model = hf_models.decoder("llama", attention_dropout=0.5)
    else:
        dropout = dict(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
        model = encoder("BertConfig", **dropout)
    ids, mask = hf_models.tokens(3, 20), hf_models.paddings(3, 20)[padding]
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    probabilities: list[float] = []
    real = _ops.forward

    def spy(q: Tensor, k: Tensor, v: Tensor, options: _ops.Options) -> tuple[Tensor, Tensor]:
        probabilities.append(options.dropout_p)
        return real(q, k, v, options)

    monkeypatch.setattr(_ops, "forward", spy)

    def run(m: Any, seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        return m(ids, attention_mask=mask)[0][kept].detach()

    expected, given = hf_models.under_both(model.eval(), run)
    assert hf_models.relative(given, expected) < TOLERANCE and not any(probabilities)
    probabilities.clear()
    dropped = run(model.train(), 1)
    assert probabilities == [0.5] * model.config.num_hidden_layers
    assert torch.equal(run(model, 1), dropped)
    for other in (given, run(model, 2)):
        assert hf_models.relative(other, dropped) > 100 * TOLERANCE
    assert torch.equal(run(model.eval(), 3), given)


# --- checkpointing, compilation -------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2_softcap_window"])
@pytest.mark.parametrize("padding", ["none", "right", "hole"])
def test_checkpointing_changes_nothing(name: str, padding: str, reentrant: bool) -> None:
    ids, mask = hf_models.tokens(3, 20), hf_models.paddings(3, 20)[padding]
    model = hf_models.decoder(name, "tilewise").train()
    loss, grads = loss_and_gradients(model, ids, mask)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    checkpointed_loss, checkpointed_grads = loss_and_gradients(model, ids, mask)
    assert devices.equal(checkpointed_loss, loss)
    assert devices.equal(checkpointed_grads, grads)


def assert_compiled_equals_eager(name: str, padding: str, backend: str) -> None:
    """Forward and backward compile to one graph each and agree with eager mode."""
    torch.compiler.reset()
    ids, mask = hf_models.tokens(3, 20), hf_models.paddings(3, 20)[padding]
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    model = hf_models.decoder(name)

    def run(call: Any) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        logits = call(ids, attention_mask=mask, use_cache=False).logits[kept]
        logits.pow(2).mean().backward()
        return logits.detach(), hf_models.gradients(model)

    logits, grads = run(model)
    compiled = torch.compile(
        hf_models.with_attention(model, "tilewise"), fullgraph=True, backend=backend
    )
    our_logits, our_grads = run(compiled)
    assert hf_models.relative(our_logits, logits) < TOLERANCE
    assert hf_models.relative(our_grads, grads) < TOLERANCE


@pytest.mark.parametrize("padding", ["none", "left", "hole"])
@pytest.mark.parametrize("name", ["llama", "gemma2_softcap_window", "gpt_oss_sinks_window"])
def test_compiles_to_one_graph(name: str, padding: str) -> None:
    assert_compiled_equals_eager(name, padding, "aot_eager")


@pytest.mark.parametrize("padding", ["none", "left"])
def test_compiled_by_inductor(padding: str) -> None:
    if torch.get_default_device().type == "cpu" and padding == "none":
        pytest.skip("takes a minute of C++ compilation: one case is enough")
    assert_compiled_equals_eager("llama", padding, "inductor")


def test_compiled_generation_with_a_static_cache() -> None:
    torch.compiler.reset()
    model, ids = hf_models.decoder("llama", "tilewise"), hf_models.tokens(3, 20)
    mask = hf_models.paddings(3, 20)["left"]
    options: dict[str, Any] = dict(
        attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None,
        **hf_models.cache_options("static"),
    )  # fmt: skip
    expected = model.generate(ids, **options)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    assert torch.equal(model.generate(ids, **options), expected)
    assert 1 <= len(graphs) <= 3, "prefill, decode, and one for changing lengths"


# --- Trainer --------------------------------------------------------------------------------------


def trained(implementation: str, folder: Path, **options: Any) -> list[float]:
    """Losses of a few steps on texts of different lengths."""
    from transformers import Trainer, TrainingArguments

    model = hf_models.decoder("llama", implementation)
    on_cpu = torch.get_default_device().type == "cpu"
    torch.manual_seed(3)
    texts = [hf_models.tokens(length).tolist() for length in (20, 13, 7, 18, 20, 5, 11, 16)]

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(text["input_ids"]) for text in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(batch):
            ids[row, : len(text["input_ids"])] = torch.tensor(text["input_ids"])
            mask[row, : len(text["input_ids"])] = 1
        return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, logging_steps=1,
            learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=on_cpu, seed=3,
            save_strategy="no", **options,
        ),
        train_dataset=[dict(input_ids=text) for text in texts],
        data_collator=collate,
    )  # fmt: skip
    with torch.device("cpu"):  # batches are drawn and collated there
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, dict(gradient_checkpointing=True)])
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    expected = trained("eager", tmp_path, **options)
    given = trained("tilewise", tmp_path, **options)
    assert len(given) == 6
    assert given[-1] < given[0]
    assert given == pytest.approx(expected, abs=1e-4)


# --- encoders, and decoders with cross-attention --------------------------------------------------


def hidden_states(model: Any, kept: Tensor | None, **inputs: Any) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    states = model(**inputs).last_hidden_state
    states = states if kept is None else states[kept]
    states.pow(2).mean().backward()
    return states.detach(), hf_models.gradients(model)


def assert_same(model: Any, kept: Tensor | None, **inputs: Any) -> None:
    (states, grads), (our_states, our_grads) = hf_models.under_both(
        model, lambda m: hidden_states(m, kept, **inputs)
    )
    assert hf_models.relative(our_states, states) < TOLERANCE
    assert hf_models.relative(our_grads, grads) < TOLERANCE


def encoder(kind: str, **extra: Any) -> Any:
    import transformers
    from transformers import AutoModel

    sizes = dict(hf_models.SIZES)
    del sizes["num_key_value_heads"]
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**sizes, **extra)
    return AutoModel.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "hole"])
@pytest.mark.parametrize("kind", ["BertConfig", "ModernBertConfig"])
def test_encoders(kind: str, padding: str) -> None:
    window = dict(local_attention=8, global_attn_every_n_layers=2)
    model = encoder(kind, **(window if kind == "ModernBertConfig" else {}))
    ids, mask = hf_models.tokens(3, 20), hf_models.paddings(3, 20)[padding]
    assert_same(model, None if mask is None else mask.bool(), input_ids=ids, attention_mask=mask)


def test_decoder_without_causality() -> None:
    model, ids = hf_models.decoder("llama"), hf_models.tokens(3, 20)
    mask = hf_models.paddings(3, 20)["left"]
    expected, given = hf_models.under_both(
        model, lambda m: m(ids, attention_mask=mask, is_causal=False, use_cache=False).logits
    )
    assert hf_models.relative(given[mask.bool()], expected[mask.bool()]) < TOLERANCE
    causal = model(ids, attention_mask=mask, use_cache=False).logits
    assert hf_models.relative(causal[mask.bool()], expected[mask.bool()]) > 0.1


def test_vision_transformer() -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=8, attn_implementation="eager",
    )  # fmt: skip
    assert_same(ViTModel(config, add_pooling_layer=False).eval(), None,
                pixel_values=torch.randn(2, 3, 32, 32))  # fmt: skip


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_encoder_and_decoder(kind: str) -> None:
    """T5 adds a learned bias to the scores; both decoders attend to the padded encoder."""
    import transformers

    torch.manual_seed(1)
    sizes: dict[str, Any] = dict(d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4)
    if kind == "Bart":
        sizes = dict(
            d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        )  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97, decoder_start_token_id=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        forced_eos_token_id=None, **sizes,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    ids, mask = hf_models.tokens(3, 20), hf_models.paddings(3, 20)["right"]

    def run(m: Any) -> tuple[Tensor, Tensor, Tensor]:
        loss, grads = loss_and_gradients_of_targets(m, ids, mask)
        text = m.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        return loss, grads, text

    (loss, grads, text), (our_loss, our_grads, our_text) = hf_models.under_both(model, run)
    assert hf_models.relative(our_loss, loss) < TOLERANCE
    assert hf_models.relative(our_grads, grads) < TOLERANCE
    assert torch.equal(our_text, text)


def loss_and_gradients_of_targets(
    model: Any, ids: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = model(ids, attention_mask=mask, labels=ids[:, :9].contiguous()).loss
    loss.backward()
    return loss.detach(), hf_models.gradients(model)
