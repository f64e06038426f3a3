"""Trains a small GPT on real text with exact attention by Tilewise.

The default text is the source of Python's own standard library on this machine.

  python examples/train_gpt.py                        800 steps, then a sample of the model's text
  python examples/train_gpt.py --text book.txt --steps 1000 --out out/book
  python examples/train_gpt.py --attention sdpa       the same model with another attention

It also trains the first steps with naive attention from the same seed and compares the losses:
exact attention changes the memory and the time, but not the training. If it is interrupted
(Ctrl-C), it saves its state and exits, and the same command continues. It writes checkpoint.pt,
losses.json, sample.txt and loss.png to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import corpus
import figures
from gpt import ATTENTION, GPT, Config
from tilewise.cli.progress import Progress
from tilewise.cli.system import current_isa, device_name, training_device
from tilewise.cli.tables import count

# Largest relative difference of a loss that rounding can cause. Adam divides by the root of tiny
# second moments, so differences in the last bit grow with every step.
SAME_LOSS = {"fp32": 5e-6, "bf16": 2e-3}
INTERRUPTED = 130


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a request to stop after the current step."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Training:
    """A model, its optimizer and its losses so far.

    All random numbers depend on (seed, step), so interruptions do not change the result.
    """

    def __init__(self, options: argparse.Namespace, text: corpus.Corpus, attention: str) -> None:
        self.options, self.text = options, text
        torch.manual_seed(options.seed)
        config = Config(
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            kv_heads=options.kv_heads,
            context=options.rows,
        )
        self.model = GPT(config, attention).to(options.device)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.losses: list[float] = []
        self.naive: list[float] = []
        self.held_out: list[tuple[int, float]] = []

    @property
    def step_number(self) -> int:
        """The number of steps done."""
        return len(self.losses)

    def autocast(self) -> torch.autocast:
        """The context of bf16 training: products in bf16, weights and sums in fp32."""
        low = self.options.dtype == "bf16"
        return torch.autocast(self.options.device, torch.bfloat16, enabled=low)

    def learning_rate(self) -> float:
        """The learning rate: a short warm-up, then half a cosine down to a tenth."""
        done, total = self.step_number, self.options.steps
        warm = max(1, min(30, total // 10))
        if done < warm:
            return self.options.learning_rate * (done + 1) / warm
        fraction = (done - warm) / max(1, total - warm)
        cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * fraction)).item())
        return self.options.learning_rate * (0.1 + 0.9 * cosine)

    def step(self) -> float:
        """Updates the weights with one batch. Returns its loss."""
        o = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        tokens, targets = self.text.batch(self.step_number, o.seed, o.batch, o.rows)
        with self.autocast():
            loss = self.model.loss(tokens.to(o.device), targets.to(o.device))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on held-out text, which is also recorded."""
        o = self.options
        tokens, targets = self.text.held_out_batch(max(8, o.batch), o.rows)
        with self.autocast():
            loss = self.model.loss(tokens.to(o.device), targets.to(o.device)).item()
        self.held_out.append((self.step_number, loss))
        return loss

    def settings(self) -> dict[str, object]:
        """The settings that a checkpoint must share to be continued; attention may differ."""
        o = self.options
        config = asdict(self.model.config)
        names = ("dtype", "steps", "batch", "seed", "learning_rate")
        return {**config, **{n: getattr(o, n) for n in names}, "text": self.text.source}

    def save(self, path: Path) -> None:
        """Writes the state to another file, then moves it to `path`, which is always complete."""
        partial = path.with_suffix(".partial")
        state = {
            "settings": self.settings(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "held_out": self.held_out,
            "naive": self.naive,
        }
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        history = {n: state[n] for n in ("losses", "held_out", "naive")}
        history["machine"] = where(self.options.device)
        path.with_name("losses.json").write_text(json.dumps(history))

    def resume(self, path: Path) -> None:
        """Continues from a checkpoint.

        Raises:
            ValueError: the file is damaged or was made with other settings, which the message
                names.
        """
        try:
            state = torch.load(path, map_location=self.options.device, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError):
            raise ValueError(
                f"{path} is not a checkpoint, or is damaged: use --fresh to start over"
            ) from None
        settings, found = self.settings(), state["settings"]
        different = [n for n in settings if settings[n] != found.get(n)]
        if different:
            changes = "; ".join(f"{n} was {found.get(n)}, now {settings[n]}" for n in different)
            raise ValueError(f"{path} cannot be continued: {changes}. Use --fresh or another --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.naive = list(state["losses"]), list(state["naive"])
        self.held_out = [(int(s), float(v)) for s, v in state["held_out"]]

    def sample(self, prompt: str, count: int) -> str:
        """The text that the model generates after `prompt`, token by token with the cache."""
        generator = torch.Generator(self.options.device).manual_seed(self.options.seed)
        start = corpus.encode(prompt.encode()).to(self.options.device)
        self.model.eval()
        with self.autocast():
            tokens = self.model.generate(start, count, generator=generator)
        return corpus.decode(tokens)


def naive_losses(
    options: argparse.Namespace, text: corpus.Corpus, interrupt: Interrupt
) -> list[float]:
    """The losses of the first steps with naive attention from the same seed."""
    twin = Training(options, text, "naive")
    count = min(options.check_steps, options.steps)
    with Progress(count, "naive attention") as bar:
        for _ in range(count):
            bar.update(loss=f"{twin.step():.4f}")
            if interrupt.requested:  # there is no state to save yet
                raise KeyboardInterrupt
    return twin.losses


def losses_agree(options: argparse.Namespace, ours: list[float], naive: list[float]) -> bool:
    """Prints both series of losses. Returns whether they differ by no more than rounding."""
    limit = SAME_LOSS[options.dtype]
    worst = 0.0
    print(f"\nThe same seed with {options.attention} and with naive attention ({options.dtype}):")
    print(f"{'step':>6}{options.attention:>12}{'naive':>12}{'difference':>13}")
    for step, (a, b) in enumerate(zip(ours, naive, strict=False), start=1):
        worst = max(worst, abs(a - b) / abs(b))
        print(f"{step:>6}{a:>12.6f}{b:>12.6f}{a - b:>13.1e}")
    same = worst <= limit
    verdict = "the same training" if same else "NOT the same training"
    print(f"largest relative difference {worst:.1e}, allowed {limit:.0e}: {verdict}\n", flush=True)
    return same


def train(run: Training, path: Path, interrupt: Interrupt) -> str:
    """Trains until done, interrupted or out of time, and saves. Returns "done", or the reason."""
    o = run.options
    started = time.monotonic()
    saved = started
    tokens = o.batch * o.rows
    with Progress(o.steps, "training", done=run.step_number) as bar:
        while run.step_number < o.steps:
            begin = time.perf_counter()
            loss = run.step()
            rate = tokens / (time.perf_counter() - begin)
            bar.update(loss=f"{loss:.3f}", tokens=f"{rate:,.0f}/s")
            if run.step_number == len(run.naive):
                bar.pause()
                if not losses_agree(o, run.losses, run.naive):
                    return "different"
            if run.step_number % o.evaluate_every == 0 or run.step_number == o.steps:
                run.evaluate()
            if time.monotonic() - saved > o.save_seconds:
                run.save(path)
                saved = time.monotonic()
            if interrupt.requested or run.step_number == o.stop_after:
                run.save(path)
                return "interrupted"
            if time.monotonic() - started > 60 * o.minutes:
                break
    if not run.held_out or run.held_out[-1][0] != run.step_number:
        run.evaluate()
    run.save(path)
    return "done" if run.step_number == o.steps else "out of time"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with a message if an option is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="text to train on (default: standard library)")
    add("--out", type=Path, default=Path("out/gpt"), metavar="DIR", help="default: out/gpt")
    add("--attention", choices=sorted(ATTENTION), default="tilewise")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="dtype of the products")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--steps", type=int, default=800)
    add("--batch", type=int, default=4, help="windows per step")
    add("--rows", type=int, default=512, help="tokens per window: the context length")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=1)
    add("--check-steps", type=int, default=8, help="number of steps to repeat with naive attention")
    add("--evaluate-every", type=int, default=25)
    add("--save-seconds", type=float, default=30.0, help="seconds between checkpoints")
    add("--minutes", type=float, default=60.0, help="longest time of the training, before sampling")
    add("--stop-after", type=int, default=-1, metavar="STEP", help="act as if interrupted there")
    add("--fresh", action="store_true", help="ignore an existing checkpoint")
    add("--prompt", default="def ", help="beginning of the sample")
    add("--sample", type=int, default=400, help="number of tokens to sample at the end")
    options = parser.parse_args(arguments)
    for name in (
        "steps",
        "batch",
        "rows",
        "layers",
        "width",
        "heads",
        "kv_heads",
        "evaluate_every",
    ):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} is {getattr(options, name)}, but must be at least 1")
    if not 1 <= len(options.prompt.encode()) <= options.rows:
        parser.error(
            f"--prompt has {len(options.prompt.encode())} bytes, but must have 1 to --rows"
        )
    try:
        options.device = training_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    if options.dtype == "auto":
        fast = options.device == "cuda" or current_isa() in ("avx512_bf16", "amx")
        options.dtype = "bf16" if fast else "fp32"
    return options


def where(device: str) -> str:
    """The name of the GPU, or that of the CPU and its number of threads."""
    threads = f", {count(torch.get_num_threads(), 'thread')}" if device == "cpu" else ""
    return device_name(device) + threads


def run(options: argparse.Namespace) -> int:
    """Trains, checks the losses, samples and plots. Returns the exit status."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "checkpoint.pt"
    text = corpus.load(options.text, options.rows)
    training = Training(options, text, options.attention)
    weights = sum(p.numel() for p in training.model.parameters())
    print(f"text: {text.source}")
    print(
        f"model: {weights / 1e6:.1f} M weights, {options.layers} layers, {options.heads} heads "
        f"({options.kv_heads} for keys), context {options.rows}; {options.attention} attention, "
        f"{options.dtype}, {where(options.device)}",
        flush=True,
    )
    if path.exists() and not options.fresh:
        training.resume(path)
        print(f"continuing {path} at step {training.step_number} of {options.steps}")
    with Interrupt() as interrupt:
        if options.attention != "naive" and training.step_number < options.check_steps:
            training.naive = naive_losses(options, text, interrupt)
        end = train(training, path, interrupt)
    if end == "different":
        return 1
    if end == "interrupted":
        print(f"\nstopped at step {training.step_number}, saved to {path}; run again to continue")
        return INTERRUPTED
    if end == "out of time":
        print(f"the time limit --minutes {options.minutes:g} ended at step {training.step_number}")
    finish(training)
    return 0


def finish(training: Training) -> None:
    """Prints a sample and the names of the files."""
    o = training.options
    step, loss = training.held_out[-1]
    print(f"\nheld-out loss after {step} steps: {loss:.3f} nats per token")
    sample = training.sample(o.prompt, o.sample)
    (o.out / "sample.txt").write_text(sample)
    print(f"a sample, beginning with {o.prompt!r}:\n")
    print("\n".join("    " + line for line in sample.splitlines()), end="\n\n")
    if figures.available():
        t = training
        figures.loss_figure(t.losses, t.held_out, t.naive, o.out / "loss.png")
        print(f"loss curve: {o.out / 'loss.png'}")
    print(f"checkpoint: {o.out / 'checkpoint.pt'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. Returns its exit status."""
    options = parse(arguments)
    try:
        return run(options)
    except (ValueError, OSError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
