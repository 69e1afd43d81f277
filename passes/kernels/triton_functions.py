"""Functions that kernels of ours call. Only these kernels' modules import this file: Triton need not be installed.

Inductor copies the functions that a kernel calls into the code that it writes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def inverse_of(x):
    """Return 1 / x for x of at least 1: a division for any x takes instructions more to scale both sides."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid_of(x):
    """Return 1 / (1 + exp(-x))."""
    return inverse_of(tl.exp(-x) + 1.0)


@triton.jit
def tanh_of(x):
    """Return tanh(x) by an exponential, and near 0, where that would cancel, by two terms of the series."""
    far = 1.0 - 2.0 * inverse_of(tl.exp2(tl.abs(x) * 2.885390043258667) + 1.0)
    far = tl.where(x < 0.0, -far, far)
    return tl.where(tl.abs(x) < 0.0625, x + x * (x * x * -0.3333333333333333), far)


@triton.jit
def erf_of(x):
    """Return erf(x) by the two polynomials of NVIDIA's function."""
    size = tl.abs(x)
    near = size < 1.002959966659546
    z = tl.where(near, x * x, size)
    p = tl.where(near, 8.483494457323104e-05, 1.6425845387857407e-05)
    p = p * z + tl.where(near, -0.0008213091641664505, -0.0004680210549850017)
    p = p * z + tl.where(near, 0.005213488824665546, 0.0052647641859948635)
    p = p * z + tl.where(near, -0.026868773624300957, -0.034303076565265656)
    p = p * z + tl.where(near, 0.11284004896879196, 0.1532936990261078)
    p = p * z + tl.where(near, -0.37612664699554443, 0.9163130521774292)
    p = p * z + tl.where(near, 0.12837915122509003, 0.6282998323440552)
    by = tl.where(near, x, -size)
    p = p * by + by
    far = 1.0 - tl.exp2(p)
    return tl.where(near, p, tl.where(x < 0.0, -far, far))


@triton.jit
def pair_of(a, b, dtype: tl.constexpr):
    """Return two numbers as FP8, in 16 bits: the cast of two neighbours is one instruction, and leaves them so."""
    low, high = tl.split(tl.join(a, b).to(dtype).to(tl.uint8, bitcast=True).to(tl.uint32))
    return low | high << 8


@triton.jit
def word_of(a, b, c, d, dtype: tl.constexpr):
    """Return four numbers as FP8, in 32 bits, the first at the lowest address."""
    return pair_of(a, b, dtype) | pair_of(c, d, dtype) << 16


@triton.jit
def in_order(a, b, c, d):
    """Return the numbers of a, b, c and d, each [n], in turns: [4 n]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * a.shape[0]])


@triton.jit
def abreast_of(x):
    """Return the four tensors [n] of which `in_order` made x: [4 n]."""
    ac, bd = tl.split(tl.reshape(x, [x.shape[0] // 4, 2, 2]))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d
