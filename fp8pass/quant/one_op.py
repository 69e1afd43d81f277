"""The op that stands for a whole quantizer while AOTAutograd traces a graph.

A quantizer is a dozen ATen ops, and AOTAutograd takes time for each: it traces every graph twice, through autograd and
several modes. So it sees one op, and the `expand_quantizers` pass writes the ATen ops into the graph that it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from fp8pass.base._torch import (
    AUTOGRAD_KEYS,
    EXPLICIT,
    FakeTensorMode,
    FunctionalTensor,
    HigherOrderOperator,
    ProxyTorchDispatchMode,
    TracingMode,
    modes_in_force,
    pytree,
    track_tensor_tree,
)


class Elementwise:
    """A quantizer whose result is laid out like its tensor: one op can stand for it."""

    @property
    def records(self) -> bool:
        """Return whether the quantizer writes the last tensor of its state."""
        return False

    def results(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return `x` quantized and dequantized; if the quantizer records, also what it writes."""
        return (cast(Any, self)(x, *state),)


class QuantizeOp(HigherOrderOperator):
    """Calls `results` of a quantizer: `op(quantizer, x, *state)`. Only in what AOTAutograd traces, see `is_traced`."""

    def __init__(self) -> None:
        super().__init__("fp8pass_quantizer")  # type: ignore[no-untyped-call]
        for key in AUTOGRAD_KEYS:
            self.fallthrough(key)  # type: ignore[no-untyped-call]

    def __call__(self, quantizer: Elementwise, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return what `results` returns, as tensors that AOTAutograd traces."""
        return super().__call__(quantizer, x, *state)  # type: ignore[no-any-return, no-untyped-call]


QUANTIZER = QuantizeOp()


@QUANTIZER.py_impl(EXPLICIT)
def _computed(quantizer: Elementwise, *tensors: Tensor) -> tuple[Tensor, ...]:
    return quantizer.results(*tensors)  # in a dump of the graph before the pass, which runs as a script


@QUANTIZER.py_functionalize_impl
def _functional(context: Any, quantizer: Elementwise, *tensors: Tensor) -> Any:
    plain = context.unwrap_tensors(tensors)
    with context.redispatch_to_next():
        return context.wrap_tensors(QUANTIZER(quantizer, *plain))


@QUANTIZER.py_impl(ProxyTorchDispatchMode)
def _traced(mode: Any, quantizer: Elementwise, *tensors: Tensor) -> Any:
    results, tracer = QUANTIZER(quantizer, *tensors), mode.tracer
    proxy = tracer.create_proxy("call_function", QUANTIZER, pytree.tree_map(tracer.unwrap_proxy, tensors), {})
    proxy.node.args = (quantizer, *proxy.node.args)  # which the tracer would make a call of the quantizer's class
    return track_tensor_tree(results, proxy, constant=None, tracer=tracer)


@QUANTIZER.py_impl(FakeTensorMode)
def _fake(mode: FakeTensorMode, quantizer: Elementwise, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    with mode:
        return (torch.empty_like(x), *map(torch.empty_like, state[-1:] if quantizer.records else ()))


def is_traced(x: Tensor) -> bool:
    """Return whether AOTAutograd traces one of our graphs, so that the op can stand for a quantizer of `x`.

    Not for sizes that vary: some quantizers compare with numbers that depend on the size, which would have to be nodes.
    And not under other modes, such as those in which a user's policy of activation checkpointing sees each op.
    """
    return (
        _tracing > 0
        and isinstance(x, FunctionalTensor)
        and not x._has_symbolic_sizes_strides
        and all(isinstance(mode, TracingMode) for mode in modes_in_force())
    )


@contextlib.contextmanager
def one_op_each() -> Iterator[None]:
    """Let graphs that AOTAutograd traces within the context have one op for each quantizer, in whatever thread."""
    global _tracing
    _tracing += 1
    try:
        yield
    finally:
        _tracing -= 1


_tracing = 0
"""Number of open `one_op_each` contexts. Not of a thread: autograd runs backwards in threads of devices."""
