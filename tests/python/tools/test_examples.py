"""The examples: the small GPT trains, resumes and samples; the others run and check themselves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import corpus  # noqa: E402
import demo  # noqa: E402
import exactness  # noqa: E402
import figures  # noqa: E402
import force_field  # noqa: E402
import gpt  # noqa: E402
import meanflow  # noqa: E402
import tilewise  # noqa: E402
import train_gpt  # noqa: E402

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--kv-heads", "1", "--rows", "48"]
TINY += ["--batch", "2", "--steps", "6", "--check-steps", "4", "--sample", "20", "--dtype", "fp32"]


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(300)))
    return path


def arguments(text: Path, out: Path, *more: str) -> list[str]:
    return [*TINY, "--text", str(text), "--out", str(out), *more]


def history(out: Path) -> dict[str, list]:
    return json.loads((out / "losses.json").read_text())


# --- the model ------------------------------------------------------------------------------------


def small_model(backend: str) -> gpt.GPT:
    torch.manual_seed(0)
    config = gpt.Config(layers=2, width=64, heads=4, kv_heads=2, context=40)
    return gpt.GPT(config, backend).double().float()


@pytest.mark.parametrize("backend", ["tilewise", "sdpa"])
def test_backends_agree_with_naive(backend):
    tokens = torch.randint(256, (2, 41))
    losses, gradients = [], []
    for name in (backend, "naive"):
        model = small_model(name)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6 * gradients[1].abs().max().item())


def test_cached_steps_give_the_logits_of_a_full_pass():
    model = small_model("tilewise")
    tokens = torch.randint(256, (3, 40))
    cache = model.empty_cache(3, torch.float32)
    with torch.no_grad():
        parts = [model.step(tokens[:, a:b], cache) for a, b in ((0, 17), (17, 18), (18, 40))]
        whole = model(tokens)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=2e-6)
    assert cache.lengths.tolist() == [40, 40, 40]


def test_generation_stops_at_the_context_length():
    model = small_model("tilewise")
    tokens = model.generate(torch.arange(5), 100)
    assert tokens.shape == (40,) and tokens[:5].tolist() == list(range(5))


@pytest.mark.parametrize("sizes", [dict(width=60, heads=4), dict(heads=4, kv_heads=3)])
def test_config_refuses(sizes):
    with pytest.raises(ValueError, match="must be"):
        gpt.Config(**sizes)


# --- the text -------------------------------------------------------------------------------------


def test_standard_library_is_found():
    names = {p.name for p in corpus.standard_library()}
    assert {"argparse.py", "os.py", "typing.py"} <= names


def test_corpus_windows(text):
    data = corpus.load(text, 48)
    tokens, targets = data.batch(3, 0, 2, 48)
    assert tokens.shape == targets.shape == (2, 48)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, data.batch(3, 0, 2, 48)[0])
    assert not torch.equal(tokens, data.batch(4, 0, 2, 48)[0])
    whole = torch.cat([data.train, data.held_out])
    assert corpus.decode(whole) == text.read_text() and len(whole) < text.stat().st_size


def test_corpus_refuses(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        corpus.load(tmp_path / "absent", 48)
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match="has 5 tokens, but windows of 48 need at least 1001"):
        corpus.load(tmp_path / "short", 48)


# --- training -------------------------------------------------------------------------------------


def test_training_end_to_end(text, tmp_path, capsys):
    assert train_gpt.main(arguments(text, tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    assert "the same training" in printed and "NOT" not in printed
    assert "a sample, beginning with 'def '" in printed
    run = history(tmp_path / "run")
    assert len(run["losses"]) == 6 and len(run["naive"]) == 4
    assert run["losses"][-1] < run["losses"][0]
    assert run["losses"][:4] == pytest.approx(run["naive"], rel=1e-5)
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")


def test_interrupted_training_resumes_identically(text, tmp_path, capsys):
    assert train_gpt.main(arguments(text, tmp_path / "whole")) == 0
    assert train_gpt.main(arguments(text, tmp_path / "parts", "--stop-after", "2")) == 130
    assert len(history(tmp_path / "parts")["losses"]) == 2
    capsys.readouterr()
    assert train_gpt.main(arguments(text, tmp_path / "parts")) == 0
    printed = capsys.readouterr().out
    assert "at step 2 of 6" in printed and "the same training" in printed
    assert history(tmp_path / "parts")["losses"] == history(tmp_path / "whole")["losses"]
    assert not list((tmp_path / "parts").glob("*.partial"))


def test_resuming_with_other_settings_is_refused(text, tmp_path, capsys):
    assert train_gpt.main(arguments(text, tmp_path, "--stop-after", "1")) == 130
    assert train_gpt.main(arguments(text, tmp_path, "--batch", "3")) == 2
    assert "batch was 2, now 3" in capsys.readouterr().err
    assert train_gpt.main(arguments(text, tmp_path, "--batch", "3", "--fresh")) == 0


def test_wrong_attention_is_detected(text, tmp_path, monkeypatch, capsys):
    def wrong(q, k, v):
        return tilewise.attention(q, k, v, causal=True, scale=0.2)

    monkeypatch.setitem(gpt.ATTENTION, "tilewise", wrong)
    assert train_gpt.main(arguments(text, tmp_path)) == 1
    assert "NOT the same training" in capsys.readouterr().out


def test_signal_stops_training_with_a_valid_checkpoint(text, tmp_path):
    command = [sys.executable, str(EXAMPLES / "train_gpt.py")]
    command += arguments(text, tmp_path / "run", "--steps", "100000", "--save-seconds", "0.2")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    deadline = time.monotonic() + 90
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    printed, _ = child.communicate(timeout=60)
    assert child.returncode == 130, printed
    state = torch.load(checkpoint, weights_only=True)
    assert len(state["losses"]) == int(re.search(r"stopped at step (\d+)", printed)[1]) > 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--steps", "0"], "--steps is 0, but must be at least 1"),
        (["--kv-heads", "0"], "--kv-heads is 0"),
        (["--prompt", ""], "--prompt has 0 bytes"),
        (["--attention", "abacus"], "invalid choice: 'abacus'"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: there is no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_training_refuses(text, tmp_path, capsys, more, sentence):
    with pytest.raises(SystemExit) as exit_:
        train_gpt.main(arguments(text, tmp_path, *more))
    assert exit_.value.code == 2 and sentence in capsys.readouterr().err


def test_unusable_files_are_refused(text, tmp_path, capsys):
    (tmp_path / "checkpoint.pt").write_text("no checkpoint")
    assert train_gpt.main(arguments(text, tmp_path)) == 2
    assert "checkpoint.pt is not a checkpoint, or is damaged" in capsys.readouterr().err
    assert train_gpt.main(arguments(text, text)) == 2
    assert "File exists" in capsys.readouterr().err


# --- the demo -------------------------------------------------------------------------------------


def test_quick_demo_has_its_own_folder():
    """Neither demo can resume the training of the other."""
    assert demo.parse([]).out != demo.parse(["--quick"]).out
    assert demo.parse(["--quick", "--out", "here"]).out == Path("here")


def test_demo_draws_one_figure(text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    small = (exactness.Setting("causal", rows=60, keys=60, causal=True),)
    monkeypatch.setattr(exactness, "SETTINGS", small)
    monkeypatch.setattr(demo, "QUICK_LENGTHS", (64, 128))
    monkeypatch.setattr(demo, "QUICK_TRAINING", TINY)
    monkeypatch.setattr(demo, "answer_a_question", lambda: 0)  # test_generate.py tests the answer
    assert demo.main(["--quick", "--text", str(text), "--out", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    picture = Path(re.search(r"picture: (.*)", printed)[1])
    assert picture.is_absolute() and picture.read_bytes().startswith(b"\x89PNG")
    assert "12 of 12 within their bounds" in printed and "the same training" in printed


def test_exactness_detects_a_wrong_result(monkeypatch):
    setting = exactness.Setting("full", rows=40, keys=40)
    assert all(row["passed"] for row in exactness.rows_of(setting, "fp32"))
    right = exactness.ours
    monkeypatch.setattr(exactness, "ours", lambda *a: right(*a) * (1 + 1e-5))
    rows = {row["tensor"]: row["passed"] for row in exactness.rows_of(setting, "fp32")}
    assert not any(rows.values())


def test_smoothing_keeps_a_constant():
    assert figures.smoothed([2.0] * 5) == pytest.approx([2.0] * 5)


# --- NumPy, C and C++ -----------------------------------------------------------------------------


def test_numpy_example_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy_attention\n"
        "sys.exit(numpy_attention.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["exactness.py", "numpy_attention.py"])
def test_examples_without_options_refuse_options(name):
    command = [sys.executable, str(EXAMPLES / name), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "unrecognized arguments: --quick" in done.stderr


@pytest.mark.parametrize(
    ("source", "variable", "compilers", "flags"),
    [
        ("attention.c", "CC", ("cc", "gcc", "clang"), ["-std=c11"]),
        ("attention.cpp", "CXX", ("c++", "g++", "clang++"), ["-std=c++20"]),
    ],
)
def test_compiled_examples(tmp_path, source, variable, compilers, flags):
    from tilewise._library import library_directory

    found = os.environ.get(variable) or next(filter(None, map(shutil.which, compilers)), None)
    if not found:
        pytest.skip("no compiler")
    program, directory = tmp_path / "example", library_directory()
    command = [found, *flags, "-Wall", "-Wextra", "-Werror", "-O1", f"-I{ROOT / 'include'}"]
    command += [str(EXAMPLES / source), f"-L{directory}", "-ltilewise", "-lm"]
    command += [f"-Wl,-rpath,{directory}", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu." in done.stdout


# --- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [meanflow, force_field])
def test_derivative_examples_follow_the_losses_of_math(example, tmp_path, capsys):
    assert example.main(["--quick", "--batch", "8", "--out", str(tmp_path)]) == 0
    assert "largest relative difference of the first losses" in capsys.readouterr().out
