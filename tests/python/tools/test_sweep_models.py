"""The sweep over Transformers' model classes: its own logic, and a seeded sample of classes."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_models
from paths import ROOT

hf_models.require("transformers>=5.24", "rich")

sys.path.insert(0, str(ROOT / "tools"))

from sweep_models import build, cases, discover, inputs, page, pool, precision, worker  # noqa: E402
from sweep_models.results import STATES, Results  # noqa: E402

# The sweep builds models and draws numbers on the CPU.
pytestmark = [*(m for m in hf_models.MARKS if m.name != "tensors"), pytest.mark.tensors("cpu")]
RESULTS = ROOT / "docs/results/models.json"
SEED, HANDFUL = 40, 6


def result(name: str) -> dict[str, Any]:
    return cases.sweep(discover.targets()[name])


@pytest.fixture(autouse=True)
def counted() -> Any:
    import tilewise.hf
    from sweep_models import watch

    watch.count_tilewise()
    yield
    tilewise.hf.register()


def test_mappings_are_found() -> None:
    targets = discover.targets()
    assert len(targets) > 1500
    assert {"CAUSAL_LM"} <= set(targets["LlamaForCausalLM"].mappings)
    assert "BASE" in targets["WhisperModel"].mappings
    model, config = discover.classes(targets["Gemma3ForCausalLM"])
    assert (model.__name__, config.__name__) == ("Gemma3ForCausalLM", "Gemma3TextConfig")


def test_decoder_passes_every_case() -> None:
    found = result("MistralForCausalLM")
    assert found["state"] == "equal", found
    assert list(found["cases"]) == ["plain", "left", "right", "bf16", "generate", "static"]
    assert all(case["state"] == "equal" for case in found["cases"].values())


def test_models_without_attention_or_with_their_own() -> None:
    assert result("ConvNextModel")["state"] == "no attention"
    found = result("BloomModel")
    assert found["state"] == "refused" and "BloomAttention" in found["why"]


def test_a_class_without_inputs_may_still_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "recipes", lambda model: iter(()))
    found = result("BloomModel")
    assert found["state"] == "refused" and "BloomAttention" in found["why"]
    assert result("LlamaModel")["state"] == "not built"


def test_an_error_of_the_sweep_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(target: Any) -> Any:
        raise IndexError("no such output")

    monkeypatch.setattr(cases, "sweep", wrong)
    found = worker.result(discover.targets()["BertModel"])
    assert found == {"state": "failed", "why": "the sweep: IndexError: no such output"}


def test_images_with_sizes_of_their_own() -> None:
    """SigLIP 2 takes padded patches with a mask, so that its attention reads a mask of images."""
    found = result("Siglip2VisionModel")
    assert found["state"] == "equal" and "spatial_shapes" in found["inputs"]


def test_wrong_attention_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention function that is slightly off fails with a number."""
    from transformers import AttentionInterface

    from sweep_models import watch
    from tilewise.integrations.transformers import attention

    def off(*args: Any, **kwargs: Any) -> Any:
        out, weights = attention(*args, **kwargs)
        return out * (1 + 1e-4), weights

    AttentionInterface.register("tilewise", watch._counted(off, "tilewise"))
    found = result("BertModel")
    assert found["state"] == "failed" and "from fp64" in found["why"]


def test_silent_eager_attention_is_detected() -> None:
    """A model that computes eager attention under the name of Tilewise does not pass as equal."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.models.bert import modeling_bert

    target = discover.targets()["BertModel"]
    build.build(target)  # counts eager's function
    AttentionInterface.register("tilewise", modeling_bert.eager_attention_forward)
    AttentionMaskInterface.register("tilewise", masking_utils.eager_mask)
    found = cases.sweep(target)
    assert found["state"] == "failed" and "called 0 times" in found["why"]


def test_errors_ignore_meaningless_outputs() -> None:
    exact = {"x": torch.ones(2, 3, 4, dtype=torch.float64), "past_key_values": torch.zeros(1)}
    rows = {3: torch.tensor([[True, True, False], [True, True, True]])}
    ours = torch.ones(2, 3, 4)
    ours[0, 2] = 7  # padding
    given = {"x": ours}
    eps = torch.finfo(torch.float32).eps
    (error,) = precision.errors(exact, {"x": torch.ones(2, 3, 4)}, given, eps, rows)
    assert error.passes and error.ours == 0
    ours[1, 2, 0] += 1e-4
    (error,) = precision.errors(exact, {"x": torch.ones(2, 3, 4)}, given, eps, rows)
    assert not error.passes
    ours[1, 2, 0] = torch.nan
    (error,) = precision.errors(exact, {"x": torch.ones(2, 3, 4)}, given, eps, rows)
    assert not error.passes and "not finite" in error.why
    (error,) = precision.errors({"loss": torch.tensor(2.0).double()}, *losses(2.0, 2.0), eps, {})
    assert error.passes and error.ours == 0
    (error,) = precision.errors({"loss": torch.tensor(2.0).double()}, *losses(2.0, 2.1), eps, {})
    assert not error.passes


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"loss": torch.tensor(value)} for value in values]


def test_double_reaches_code_that_requests_float() -> None:
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with precision.double():
        assert torch.equal(x.to(torch.float32), x)
        assert torch.equal(x.float().softmax(0, dtype=torch.float32), torch.ones(1).double())
        torch.manual_seed(0)
        drawn = torch.rand(4, dtype=torch.float64)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(4).double())
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("kind", inputs.PADDINGS)
def test_padding(kind: str) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=100, pad_token_id=0, eos_token_id=99)
    ids = torch.randint(5, 99, (3, 11))
    made = inputs.padded({"input_ids": ids}, kind, config)
    mask = made["attention_mask"].bool()
    assert mask.any(1).all() and mask[1].all() and not mask.all()
    assert bool((made["input_ids"][~mask] == 0).all())
    assert bool(((made["input_ids"] == 99).sum(1) == 1).all())
    first, last = mask.long().argmax(1), 10 - mask.flip(1).long().argmax(1)
    assert bool((made["input_ids"].gather(1, last[:, None]) == 99).all())
    assert bool((first > 0).any()) == (kind != "right")
    assert bool((last < 10).any()) == (kind != "left")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("import os, sys; print('ready', flush=True); input(); os.abort()", "SIGABRT"),
        ("import time; print('ready', flush=True); input(); time.sleep(60)", "no result within"),
        # A process that fails takes a while to end.
        (
            "import os, time; print('ready', flush=True); input(); os.close(1); time.sleep(3); "
            "os._exit(3)",
            "ended with 3",
        ),
    ],
)
def test_crashes_and_hangs_are_results(script: str, why: str) -> None:
    worker = pool.Worker((sys.executable, "-c", script), limit=2.0)
    found = worker.sweep("BertModel")
    assert found["state"] == "failed" and why in found["why"]
    worker.close()


def test_every_class_is_on_the_page(tmp_path: Path) -> None:
    targets = discover.targets()
    results = Results(tmp_path / "models.json")
    results.put("BertModel", {"state": "no attention"})
    results.put("LlamaModel", {"state": "failed", "why": "plain: LlamaModel | x"})
    results.write()
    text = page.page(Results(tmp_path / "models.json"), targets)
    assert all(name in text for name in targets)
    assert text.count("no result yet") == 1 and "LlamaModel \\| x" in text


def test_the_page_of_a_sweep_is_that_of_its_file(tmp_path: Path) -> None:
    targets = discover.targets()
    results = Results(tmp_path / "models.json")
    case = {"state": "equal", "ours": 1e-7, "eager": 1e-7}
    results.put("BertModel", {"state": "equal", "cases": {"plain": case, "bf16": case}})
    results.write()
    stored = page.page(Results(tmp_path / "models.json"), targets)
    assert page.page(results, targets) == stored and "| bf16, plain |" in stored


def test_results_from_other_sources_are_stale(tmp_path: Path) -> None:
    results = Results(tmp_path / "models.json")
    results.classes["LlamaModel"] = {"state": "equal", "sources": "earlier"}
    results.put("BertModel", {"state": "no attention"})
    assert results.stale() == ["LlamaModel"]


def test_committed_page_matches_the_committed_results() -> None:
    results = Results(RESULTS)
    if results.stored["transformers"] != results.versions["transformers"]:
        pytest.skip("the results are of another version of Transformers")
    targets = discover.targets()
    assert set(results.classes) <= set(targets)
    assert {value["state"] for value in results.classes.values()} <= set(STATES)
    assert (ROOT / "docs/integrations/models.md").read_text() == page.page(results, targets)


def test_sample_matches_the_committed_results(tmp_path: Path) -> None:
    stored = json.loads(RESULTS.read_text())["classes"]
    quick = [name for name, value in stored.items() if value["state"] == "equal"
             and value["seconds"] < 6]  # fmt: skip
    names = random.Random(SEED).sample(quick, HANDFUL)
    found: dict[str, Any] = {}
    pool.sweep(names, 1, found.__setitem__)
    assert {name: value["state"] for name, value in found.items()} == dict.fromkeys(
        names, "equal"
    ), found
