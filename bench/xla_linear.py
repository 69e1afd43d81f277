"""Time a linear layer's forward and backward in XLA, in BF16 and FP8; print rows like bench/h200.py's as a JSON list.

    python bench/xla_linear.py M K N cuda|cpu

"xla dynamic" is plain JAX that quantizes operands by their own amax and dequantizes them before each dot, which XLA's
GemmRewriter turns into FP8 matmuls. "flax delayed" is Flax's own layer. Seconds are wall-clock times of several calls,
which take turns with calls of XLA's BF16. 64 rows of each result are compared with float64.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BF16, E4M3, E5M2 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
F8_CALL = "__cublas$lt$matmul$f8"
ROWS = 64

Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]
"""(x[M, K], w[K, N], grad of y[M, N]) -> (y, grad of x, grad of w)."""


def qdq(x: Any, dtype: Any) -> Any:
    """Quantize x [...] to FP8 with the scale from its amax, and dequantize it to [...] of x's dtype."""
    largest = jnp.finfo(dtype).max.astype(jnp.float32)
    scale = largest / jnp.max(jnp.abs(x)).astype(jnp.float32)
    quantized = jnp.clip(x.astype(jnp.float32) * scale, -largest, largest).astype(dtype)
    return quantized.astype(x.dtype) * (1 / scale).astype(x.dtype)


def bf16(x: Any, w: Any, g: Any) -> tuple[Any, Any, Any]:
    """Compute the three matmuls in BF16: the baseline."""
    return x @ w, g @ w.T, x.T @ g


def dynamic(x: Any, w: Any, g: Any) -> tuple[Any, Any, Any]:
    """Compute the three matmuls with QDQ: input and weight in e4m3, the gradient in e5m2."""
    x, w, g = qdq(x, E4M3), qdq(w, E4M3), qdq(g, E5M2)
    return x @ w, g @ w.T, x.T @ g


def flax_delayed(x: Any, w: Any) -> Step:
    """Return a step of Flax's layer with delayed scaling, which keeps the layer's state from call to call."""
    from flax import linen

    operator = getattr(linen, "Fp8DirectDotGeneralOp", None) or linen.Fp8DotGeneralOp
    layer = linen.Dense(w.shape[1], use_bias=False, dtype=BF16, param_dtype=BF16, dot_general_cls=operator)
    state = layer.init(jax.random.key(0), x[:16])["_overwrite_with_gradient"]

    def step(state: Any, x: Any, w: Any, g: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(lambda s, k, x: layer.apply({"params": {"kernel": k}, **with_state(s)}, x), state, w, x)
        new_state, of_w, of_x = pull(g)
        return (y, of_x, of_w), new_state

    run, held = jax.jit(step), [state]

    def one(x: Any, w: Any, g: Any) -> tuple[Any, Any, Any]:
        found, held[0] = run(held[0], x, w, g)
        return found

    one.lower = lambda *args: run.lower(held[0], *args)  # type: ignore[attr-defined]
    return one


def with_state(state: Any) -> dict[str, Any]:
    """Return the state under Flax's name for variables that are replaced by their gradients."""
    return {"_overwrite_with_gradient": state}


def timed(base: Step, step: Step, args: tuple[Any, Any, Any], calls: int) -> dict[str, Any]:
    """Time five rounds of `calls` calls of each function, in turns; return medians and the speed-up."""
    found: list[list[float]] = [[], []]
    for _ in range(5):
        for times, function in zip(found, (base, step), strict=True):
            begun = time.perf_counter()
            for _ in range(calls):
                results = function(*args)
            jax.block_until_ready(results)
            times.append((time.perf_counter() - begun) / calls * 1e3)
    ratios = sorted(b / f for b, f in zip(*found, strict=True))
    return {"ms": [sorted(times)[2] for times in found], "speedup": ratios[2], "p20_80": [ratios[1], ratios[3]]}


def checked(found: tuple[Any, Any, Any], args: tuple[Any, Any, Any]) -> list[float]:
    """Return the SQNR of the first rows of each result, in dB."""
    x, w, g = (np.asarray(t.astype(jnp.float32), np.float64) for t in args)
    noise = []
    for wanted, got in zip((x[:ROWS] @ w, g[:ROWS] @ w.T, x[:, :ROWS].T @ g), found, strict=True):
        off = wanted - np.asarray(got[:ROWS].astype(jnp.float32), np.float64)
        noise.append(float(10 * np.log10(np.square(wanted).sum() / np.square(off).sum())))
    return noise


def point(name: str, make: Callable[[], Any], base: Any, args: tuple[Any, Any, Any], calls: int) -> dict[str, Any]:
    """Measure one contender; return a point that says why if a package is missing or refuses."""
    try:
        step = make()
    except ImportError as error:
        return {"who": name, "status": f"skipped: {error}"}
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:
        return {"who": name, "status": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    for _ in range(3):
        results = step(*args)
    text = step.lower(*args).compile().as_text()
    found = {"who": name, "dB": checked(results, args), "fp8_matmuls": text.count(f'"{F8_CALL}"')}
    return {**found, **timed(base, step, args, calls)}


def main(m: int, k: int, n: int, device: str) -> None:
    """Print the points of one shape."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (m, k), (k, n), (m, n)
    args = tuple(jax.random.normal(key, shape, BF16) for key, shape in zip(keys, shapes, strict=True))
    if jax.default_backend() != {"cuda": "gpu"}.get(device, device):
        shown = [{"who": "xla", "status": f"skipped: this JAX runs on {jax.default_backend()}, not on {device}"}]
    else:
        base = jax.jit(bf16)
        jax.block_until_ready(base(*args))
        makers = {"xla dynamic": lambda: jax.jit(dynamic), "flax delayed": lambda: flax_delayed(*args[:2])}
        calls = 3 if device == "cpu" else 20
        shown = [point(name, make, base, args, calls) for name, make in makers.items()]
    print(json.dumps(shown))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
