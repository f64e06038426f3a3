"""Random problems that combine every option with every other, on every device and instruction set,
compared with the oracle.

The default run draws the same problems every time. TILEWISE_TEST_EXAMPLES=<n> draws n new ones per
dtype instead; with 20000, `pytest tests/python/attention/test_properties.py` runs for hours.
"""

from __future__ import annotations

import functools
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from cases import Case, check
from strategies import cases, latent, logits_wanted, masked, shards, wide_out
from tilewise import _check

THOROUGH = int(os.environ.get("TILEWISE_TEST_EXAMPLES", "0"))
SHARDS = 8  # per dtype, so that test processes can share the work
EXAMPLES = {"cpu": 900, "cuda": 600, "emulator": 150}
if "TILEWISE_TEST_EXAMPLES_PER_DTYPE" in os.environ:  # fewer of the same problems
    EXAMPLES = dict.fromkeys(EXAMPLES, int(os.environ["TILEWISE_TEST_EXAMPLES_PER_DTYPE"]))


def problems(strategy, dtype: str, shard: int, device: str, served: Counter, shards: int = SHARDS):
    """A test of fresh random problems of one dtype, which counts the kernels that run. It is one of
    `shards` tests that share the examples."""

    @settings(
        max_examples=(THOROUGH or EXAMPLES[device]) // shards,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if THOROUGH else [Phase.generate],
    )
    @given(case=strategy(dtype, small=device == "emulator"))
    def body(case: Case) -> None:
        served.update(name.rpartition(".")[0] for name in check(case))

    return body if THOROUGH else seed(shard)(body)


@pytest.mark.abi
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_random_problems(dtype, shard, device, record_property):
    served: Counter = Counter()
    problems(cases, dtype, shard, device.name, served)()
    record_property("served", dict(served))


@pytest.mark.abi
@pytest.mark.parametrize("shard", range(2))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_random_shards_of_larger_problems(dtype, shard, device):
    problems(shards, dtype, shard, device.name, Counter())()


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_random_latent_caches(dtype, device):
    kind = "cpu" if device.name == "cpu" else "cuda"
    strategy = functools.partial(latent, largest=_check.max_head_dim(kind))
    problems(strategy, dtype, 0, device.name, Counter(), shards=2 * SHARDS)()


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_random_masks(dtype, device):
    problems(masked, dtype, 0, device.name, Counter(), shards=3 * SHARDS)()


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_random_problems_with_max_logits(dtype, device):
    problems(logits_wanted, dtype, 0, device.name, Counter(), shards=2 * SHARDS)()


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_random_problems_with_out_in_float32(dtype, device):
    problems(wide_out, dtype, 0, device.name, Counter(), shards=2 * SHARDS)()
