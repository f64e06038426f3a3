"""Random JAX arrays and their comparison, on two devices where the CPU is JAX's platform."""

from __future__ import annotations

import os

import numpy as np

# JAX reads it when it first looks for devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
import jax
import jax.numpy as jnp

import tilewise
from rounded_weights import same_out

jax.config.update("jax_default_matmul_precision", "highest")  # of the functions to compare with
ON_GPU = jax.default_backend() == "gpu"


def random(*shapes, dtype=jnp.float32, seed=3):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def same(got, want, bound=None):
    """Whether the bits are equal; on a GPU, where plans depend on the batch, nearly: by default
    within what the dtype of each array allows."""
    if ON_GPU:

        def compare(a, b):
            close(a, b, bound or (2**-7 if a.dtype.itemsize < 4 else 1e-5))

        jax.tree.map(compare, got, want)
        return True
    return jax.tree.all(jax.tree.map(np.array_equal, got, want))


def same_but_for_weights(rounded, narrow, bound=None):
    """Whether an out in float32 that was rounded to 16 bits is the out in 16 bits, as far as the
    rounding of weights lets it be."""
    if ON_GPU:
        return same(rounded, narrow, bound)
    kernel = tilewise.explain(*[np.zeros((1, 9, 1, 8), narrow.dtype)] * 3).forward.kernel
    return same_out(*(np.asarray(x, np.float32) for x in (rounded, narrow)), kernel)


def close(got, want, bound=2e-6):
    """Whether the numbers are as close as `bound`; on a GPU, which adds in another order, relative
    to the largest of their array."""

    def compare(a, b):
        finite = np.asarray(b)[np.isfinite(b)]
        size = max(1.0, float(np.abs(finite).max(initial=0.0))) if ON_GPU else 1.0
        np.testing.assert_allclose(a, b, atol=bound * size, rtol=bound)

    jax.tree.map(compare, got, want)
