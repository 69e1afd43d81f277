"""Compile a fused matmul to learn what it needs, before anything depends on it."""

from __future__ import annotations

from typing import Any

from fp8pass.base._torch import pointer_type
from fp8pass.base.errors import first_line
from fp8pass.passes.kernels.element_addresses import CannotFuse
from fp8pass.passes.kernels.fused_plan import Plan
from fp8pass.passes.kernels.matmul_source import kernel_of


def compiled(plan: Plan) -> Any:
    """Compile the kernel of a plan; return Triton's `CompiledKernel`. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: pointer_type(dtype) for name, dtype in plan.parameters.items()}
    # as Inductor tells Triton of tensors: how wide loads are depends on it, and with that the shared memory
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    if plan.matmul.symbolic:
        signature["m"] = "i32"
    source = ASTSource(kernel_of(plan).fn, signature, {}, aligned)
    options = {"num_warps": plan.tile.warps, "num_stages": plan.tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", plan.capability, 32), options=options)


def shared_memory(plan: Plan) -> int:
    """Return the bytes of shared memory that one block of the kernel takes.

    An estimate misses what conversions between layouts take. Raises CannotFuse if Triton can't compile the kernel.
    """
    try:
        return int(compiled(plan).metadata.shared)
    except Exception as error:  # of many types, from the compilers that Triton runs
        raise CannotFuse(f"Triton can't compile the kernel: {first_line(error)}") from error
