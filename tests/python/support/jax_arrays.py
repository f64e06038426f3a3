"""Random JAX arrays and their comparison, on two devices where the CPU is JAX's platform."""

from __future__ import annotations

import os

import numpy as np

# JAX reads it when it first looks for devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
import jax
import jax.numpy as jnp

jax.config.update("jax_default_matmul_precision", "highest")  # of the functions to compare with
ON_GPU = jax.default_backend() == "gpu"


def random(*shapes, dtype=jnp.float32, seed=3):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def same(got, want):
    """Whether the bits are equal; on a GPU, where plans depend on the batch, nearly."""
    if ON_GPU:
        close(got, want, 1e-5)
        return True
    return jax.tree.all(jax.tree.map(np.array_equal, got, want))


def close(got, want, bound=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=bound, rtol=bound), got, want)
