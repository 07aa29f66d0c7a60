"""NF4 with double quantisation in plain numpy, one step after the other, for machines without bitsandbytes."""

import itertools
from typing import NamedTuple

import numpy as np

F32 = np.float32

LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    F32,
)


class Quantized(NamedTuple):
    codes: np.ndarray
    absmax: np.ndarray
    nested_absmax: np.ndarray
    offset: np.ndarray


def signed_map() -> np.ndarray:
    """The signed dynamic map, float32[256], from float64 arithmetic rounded where PyTorch rounds."""
    values = [F32(0), F32(1)]
    for exponent in range(7):
        parts = 2**exponent
        step = float(F32((F32(1) - F32(0.1)) / F32(parts)))
        edges = [
            F32(float(F32(0.1)) + step * i) if i < (parts + 1) // 2 else F32(1 - step * (parts - i))
            for i in range(parts + 1)
        ]
        for low, high in itertools.pairwise(edges):
            middle = F32(10.0 ** (exponent - 6)) * (F32(low + high) / F32(2))
            values += [middle, -middle]
    return np.array(sorted(values), F32)


def torch_sum(values: np.ndarray) -> np.float32:
    """The sum in the order of PyTorch's SumKernel.cpp for contiguous float32 on AVX2, one thread."""
    lanes = 8 if values.size >= 8 else 1
    vectors = values[: values.size // lanes * lanes].reshape(-1, lanes)
    size = len(vectors) // 4
    power = max(4, (size - 1).bit_length() // 4 if size > 1 else 0)
    rows = vectors[: size * 4].reshape(size, 4, lanes)
    levels = np.zeros((4, 4, lanes), F32)
    done = size >> power << power
    for i in range(done):
        levels[0] += rows[i]
        if (i + 1) % (1 << power) == 0:
            for level in range(1, 4):
                levels[level] += levels[level - 1]
                levels[level - 1] = 0
                if (i + 1) & (((1 << power) - 1) << (level * power)):
                    break
    for row in rows[done:]:
        levels[0] += row
    interleaved = levels[0] + levels[1] + levels[2] + levels[3]
    for vector in vectors[size * 4 :]:
        interleaved[0] += vector
    sums = interleaved[0] + interleaved[1] + interleaved[2] + interleaved[3]
    if lanes == 1:
        return sums[0]
    total = F32(0)
    for value in [*values[len(vectors) * lanes :], *sums]:
        total = F32(total + value)
    return total


def quantize(weight: np.ndarray) -> Quantized:
    """Quantise a matrix [out, in] without subnormal numbers."""
    flat = weight.astype(F32).reshape(-1)
    codes, scales = [], []
    midpoints = (LEVELS[:-1] + LEVELS[1:]) / F32(2)
    for start in range(0, flat.size, 64):
        block = flat[start : start + 64]
        scale = np.abs(block).max()
        divisor = np.maximum(scale, F32(1e-38))
        scaled = block * (F32(1) / divisor) if block.size == 64 else block / divisor
        codes.append(np.searchsorted(midpoints, scaled, side="left"))
        scales.append(scale if block.size == 64 else divisor)
    nibbles = np.concatenate([*codes, np.full(flat.size % 2, 7)]).astype(np.uint8)
    absmax = np.array(scales, F32)
    offset = F32(torch_sum(absmax) / F32(absmax.size))
    indices, nested = zip(
        *(_quantize_group(absmax[i : i + 256] - offset) for i in range(0, absmax.size, 256)), strict=True
    )
    return Quantized(nibbles[0::2] << 4 | nibbles[1::2], np.concatenate(indices), np.array(nested, F32), offset)


def _quantize_group(values: np.ndarray) -> tuple[np.ndarray, np.float32]:
    largest = np.abs(values).max()
    if largest == 0:
        return np.zeros(values.shape, np.uint8), largest
    levels = signed_map()
    point = ((np.clip(values * (F32(1) / largest), -1, 1) + F32(1)) * F32(0.5) * F32(65535) + F32(0.5)).astype(int)
    snapped = (F32(-1) + F32(2) * point.astype(F32) / F32(65535)).astype(F32)
    midpoints = F32(0.5) * (levels[:-1] + levels[1:])
    return np.searchsorted(midpoints, snapped, side="left").astype(np.uint8), largest


def dequantize(quantized: Quantized, shape: tuple[int, int]) -> np.ndarray:
    """The matrix in float32."""
    n = shape[0] * shape[1]
    nested = np.repeat(quantized.nested_absmax, 256)[: quantized.absmax.size]
    scales = signed_map()[quantized.absmax] * nested + quantized.offset
    nibbles = np.stack([quantized.codes >> 4, quantized.codes & 15], axis=1).reshape(-1)[:n]
    return (LEVELS[nibbles] * np.repeat(scales, 64)[:n]).reshape(shape)
