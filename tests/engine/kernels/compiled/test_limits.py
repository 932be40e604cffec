import platform

import numpy as np
import pytest
from llvmlite import binding as llvm

from engine.kernels.compiled import isa
from engine.kernels.compiled.jit import Library
from engine.kernels.compiled.limits import PATTERN, READ_UNIT, STEPS, Limits, build

pytestmark = pytest.mark.slow

NEEDED = {
    "avx512-vnni": ("avx512vnni", "avx512bw", "avx512vl"),
    "avx-vnni": ("avxvnni",),
    "avx2": ("avx2", "fma", "f16c"),
    "plain": (),
}


def runnable() -> list[str]:
    if platform.machine() != "x86_64":
        return ["plain"]
    features = llvm.get_host_cpu_features()
    return [name for name, needed in NEEDED.items() if all(features.get(feature) for feature in needed)]


@pytest.fixture(params=runnable())
def limits(request: pytest.FixtureRequest, tmp_path) -> Limits:
    return Limits(Library(isa.named(request.param), tmp_path))


@pytest.mark.parametrize("passes", [0, 1, PATTERN, PATTERN + 3])
def test_every_multiply_add_counted_is_made(limits: Limits, passes: int):
    codes = limits.codes.reshape(limits.chains, 16, 4).astype(np.int64)
    expected, num_products = np.zeros((limits.chains, 16), np.int64), 0
    for index in range(passes):
        for step in range(STEPS):
            products = codes * limits.activations[index % PATTERN, step]
            expected += products.sum(axis=-1)
            num_products += products.size

    assert np.array_equal(limits.dot_products(passes), expected)
    assert limits.multiply_adds(passes) == num_products


@pytest.mark.parametrize("num_units", [0, 1, 7])
def test_every_byte_is_read(limits: Limits, num_units: int):
    memory = np.random.default_rng(0).integers(0, 256, num_units * READ_UNIT, dtype=np.uint8)

    assert limits.read(memory) == int(memory.view(np.uint32).sum(dtype=np.uint32))


@pytest.mark.skipif("avx512-vnni" not in runnable(), reason="counts this instruction")
def test_the_loop_is_made_of_the_dot_product_instruction_alone():
    path = isa.named("avx512-vnni")
    lines = Library(path).assembly("limits", lambda module: build(module, path)).splitlines()
    operations = [line.split()[0] for line in lines if line.startswith("\t")]
    places = [i for i, operation in enumerate(operations) if operation == "vpdpbusd"]

    loop = operations[places[0] : places[-1] + 1]
    assert loop.count("vpdpbusd") == 12 * STEPS
    assert set(loop) == {"vpdpbusd", "vpbroadcastd"}
    assert loop.count("vpbroadcastd") == STEPS - 1
