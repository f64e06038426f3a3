"""Trains a small GPT in JAX on the source of Python's standard library, or on `--text FILE`.

  pip install 'tilewise[jax]' matplotlib
  python examples/train_jax.py [--steps N] [--out DIRECTORY]

The model is that of `gpt.py` in plain JAX: RMSNorm, rotary positions, grouped-query attention by
`tilewise.jax.attention`, SwiGLU; the optimiser is Adam. The first steps are repeated with the
attention of `jax.nn`, and the losses are compared. It writes losses.json and loss.png.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import figures
import tilewise.jax
from tilewise.cli.progress import Progress

VOCABULARY, LAYERS, WIDTH, HEADS, KV_HEADS = 256, 2, 128, 4, 2
HEAD_DIM, HIDDEN = WIDTH // HEADS, 384
BATCH, ROWS = 8, 192
HELD_OUT = 100_000  # bytes at the end of the text
WARM_UP, LEARNING_RATE = 20, 3e-3
LARGEST_DIFFERENCE = 1e-3  # between losses of the two attentions

Parameters = dict[str, Any]
Attention = Callable[..., jax.Array]


def parameters(key: jax.Array) -> Parameters:
    """Random weights; those of the layers are stacked, [layer, ...]."""
    shapes = {
        "q": (WIDTH, HEADS * HEAD_DIM), "k": (WIDTH, KV_HEADS * HEAD_DIM),
        "v": (WIDTH, KV_HEADS * HEAD_DIM), "out": (HEADS * HEAD_DIM, WIDTH),
        "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    }  # fmt: skip
    keys = iter(jax.random.split(key, len(shapes) + 1))
    layers = {
        name: jax.random.normal(next(keys), (LAYERS, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    layers |= {name: jnp.ones((LAYERS, WIDTH)) for name in ("attention_norm", "mlp_norm")}
    embedding = jax.random.normal(next(keys), (VOCABULARY, WIDTH)) * 0.02
    return {"embedding": embedding, "norm": jnp.ones(WIDTH), "layers": layers}


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding (arXiv 2104.09864) of [batch, row, head, column] from position 0 on."""
    frequencies = 10000.0 ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def block(attention: Attention, x: jax.Array, layer: Parameters) -> tuple[jax.Array, None]:
    """One layer of the model, on [batch, row, WIDTH]."""
    y = rms_norm(x, layer["attention_norm"])
    q, k, v = ((y @ layer[n]).reshape(*y.shape[:2], -1, HEAD_DIM) for n in ("q", "k", "v"))
    out = attention(rotated(q), rotated(k), v)
    x = x + out.reshape(*x.shape[:2], -1) @ layer["out"]
    y = rms_norm(x, layer["mlp_norm"])
    return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"], None


def loss(attention: Attention, weights: Parameters, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy in nats of predicting each of the tokens [batch, row + 1] but the
    first from those before it.
    """
    x = weights["embedding"][tokens[:, :-1]] * WIDTH**0.5
    x, _ = jax.lax.scan(partial(block, attention), x, weights["layers"])
    logits = rms_norm(x, weights["norm"]) @ weights["embedding"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -picked.mean()


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(attention: Attention, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """(state, loss) after a step of Adam; the state is (weights, mean, variance, step)."""
    weights, mean, variance, step = state
    value, grads = jax.value_and_grad(partial(loss, attention))(weights, tokens)
    step = step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    variance = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, variance, grads)
    rate = LEARNING_RATE * jnp.minimum(1.0, step / WARM_UP)

    def updated(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1 - 0.9**step), v / (1 - 0.99**step)
        return w - rate * m / (jnp.sqrt(v) + 1e-8)

    return (jax.tree.map(updated, weights, mean, variance), mean, variance, step), value


@jax.jit
def initial_state() -> Any:
    """The state of ``train_step`` before the first step."""
    weights = parameters(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return weights, zeros, jax.tree.map(jnp.copy, zeros), jnp.float32(0)


def read_text(file: Path | None) -> np.ndarray:
    """The bytes of a file, or of the modules at the top of the standard library."""
    if file is not None:
        return np.frombuffer(file.read_bytes(), np.uint8)
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\n".join(path.read_bytes() for path in modules), np.uint8)


def windows(text: np.ndarray, seed: int) -> jax.Array:
    """BATCH random pieces of the text, [BATCH, ROWS + 1] int32."""
    starts = np.random.default_rng(seed).integers(0, len(text) - ROWS, BATCH)
    return jnp.asarray(text[starts[:, None] + np.arange(ROWS + 1)], jnp.int32)


def main(arguments: list[str] | None = None) -> int:
    """Trains. Returns 0 if the losses of both attentions agree and the loss falls."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--check-steps", type=int, default=5, help="steps repeated with jax.nn")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/jax"))
    given = parser.parse_args(arguments)
    text = read_text(given.text)
    if len(text) < HELD_OUT + 10 * ROWS:
        parser.error(f"the text has {len(text)} bytes, but {HELD_OUT + 10 * ROWS} are needed")
    train, held_out = text[:-HELD_OUT], windows(text[-HELD_OUT:], 0)

    ours = partial(tilewise.jax.attention, causal=True)
    theirs = partial(jax.nn.dot_product_attention, is_causal=True)
    state, naive = initial_state(), []
    for step in range(given.check_steps):
        state, value = train_step(theirs, state, windows(train, step))
        naive.append(float(value))

    state, losses, tested = initial_state(), [], []
    measure = jax.jit(partial(loss, ours))
    begin = time.monotonic()
    with Progress(given.steps, "training") as progress:
        for step in range(given.steps):
            state, value = train_step(ours, state, windows(train, step))
            losses.append(float(value))
            if step % 50 == 49 or step == given.steps - 1:
                tested.append((step + 1, float(measure(state[0], held_out))))
            progress.update(loss=f"{losses[-1]:.3f}")
    seconds = time.monotonic() - begin

    differences = [abs(a - b) for a, b in zip(losses, naive, strict=False)]
    print(f"{given.steps} steps of {BATCH * ROWS} tokens on {jax.devices()[0].platform} "
          f"in {seconds:.0f} s; held-out loss {tested[-1][1]:.3f} nats per byte")  # fmt: skip
    if differences:
        print(f"first {len(differences)} losses: at most {max(differences):.1e} from jax.nn")
    given.out.mkdir(parents=True, exist_ok=True)
    history = {"losses": losses, "held_out": tested, "jax.nn": naive}
    (given.out / "losses.json").write_text(json.dumps(history))
    if figures.available():
        figures.loss_figure(losses, tested, naive, given.out / "loss.png")
        print(f"plot: {given.out / 'loss.png'}")
    agree = max(differences, default=0) < LARGEST_DIFFERENCE
    return 0 if agree and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
