import math

import numpy as np
import pytest

from engine.rope import RopeConfig


def llama3_by_cases(frequencies, factor, low, high, context):
    """Meta's three cases, one frequency at a time, by wavelength."""
    scaled = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            scaled.append(frequency)
        elif wavelength > context / low:
            scaled.append(frequency / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return np.array(scaled)


def test_frequencies_fall_from_one_radian_per_position_by_a_constant_ratio():
    assert RopeConfig(base=10000.0, dim=8).inverse_frequencies() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-15)


def test_linear_scaling_stretches_every_wave():
    plain = RopeConfig(base=10000.0, dim=64).inverse_frequencies()

    scaled = RopeConfig(base=10000.0, dim=64, scaling="linear", factor=4.0).inverse_frequencies()

    assert np.array_equal(scaled, plain / 4)


def test_divisors_divide_one_frequency_each():
    config = RopeConfig(base=10000.0, dim=8, divisors=(1.0, 2.0, 4.0, 8.0))

    assert config.inverse_frequencies() == pytest.approx([1.0, 0.05, 0.0025, 0.000125], rel=1e-15)


def test_linear_scaling_and_divisors_apply_both():
    config = RopeConfig(base=10000.0, dim=4, scaling="linear", factor=2.0, divisors=(1.0, 5.0))

    assert config.inverse_frequencies() == pytest.approx([0.5, 0.001], rel=1e-15)


@pytest.mark.parametrize(("dim", "factor", "context"), [(128, 8.0, 8192), (64, 32.0, 8192), (64, 4.0, 256)])
def test_llama3_scaling_is_meta_s_definition(dim, factor, context):
    plain = RopeConfig(base=500000.0, dim=dim).inverse_frequencies()
    config = RopeConfig(
        base=500000.0, dim=dim, scaling="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_context=context,
    )  # fmt: skip

    scaled = config.inverse_frequencies()

    assert scaled == pytest.approx(llama3_by_cases(plain, factor, 1.0, 4.0, context), rel=1e-12)
    stretched = plain / scaled
    assert stretched[0] == 1.0
    assert stretched[-1] == pytest.approx(factor)
    assert np.any((stretched > 1.01) & (stretched < 0.99 * factor))


def test_the_tensor_llama_cpp_writes_for_llama_3_gives_the_same_frequencies():
    plain = RopeConfig(base=500000.0, dim=128).inverse_frequencies()
    divisors = plain / llama3_by_cases(plain, 8.0, 1.0, 4.0, 8192)

    by_tensor = RopeConfig(base=500000.0, dim=128, divisors=tuple(divisors.tolist()))
    by_numbers = RopeConfig(
        base=500000.0, dim=128, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_context=8192,
    )  # fmt: skip

    assert by_tensor.inverse_frequencies() == pytest.approx(by_numbers.inverse_frequencies(), rel=1e-12)
