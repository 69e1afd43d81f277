"""Train with Hugging Face Accelerate: `Accelerator(dynamo_plugin=Fp8Plugin(options={"recipe": "rowwise"}))`.

Importing this module lets Accelerate take "fp8pass" as the name of a backend, for example in ACCELERATE_DYNAMO_BACKEND.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fp8pass.base.errors import Fp8Error
from fp8pass.integrations.checks import check_autocast, importing
from fp8pass.integrations.step import OpenStep
from fp8pass.options.config import make_config

with importing("accelerate", "1.15"):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, is_initialized
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

BACKEND = "fp8pass"
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Fp8Plugin(TorchDynamoPlugin):  # type: ignore[misc]  # Accelerate has no types
    """A plugin that lets `Accelerator.prepare` compile models with fp8pass.

    Args:
        options: Fields of `fp8pass.Config`, as for `torch.compile(..., options=...)`.
        use_regional_compilation: Whether repeated blocks are compiled one by one, each once. None: as
            ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION says.
        dynamic: As for `torch.compile`.

    Raises:
        ValueError: If an option is unknown or its value is invalid.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        use_regional_compilation: bool | None = None,
        dynamic: bool | None = None,
    ) -> None:
        make_config(options or {})
        super().__init__(
            backend=BACKEND,
            options=dict(options or {}),
            use_regional_compilation=use_regional_compilation,
            dynamic=dynamic,
        )

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile`, which takes a mode or options, not both.

        Raises:
            Fp8Error: If Accelerate does something that contradicts fp8pass, see `check`.
        """
        if is_initialized():  # that is, when `Accelerator.prepare` compiles
            check(AcceleratorState())
        given: dict[str, Any] = super().to_kwargs()
        given.pop("mode", None)
        return {**given, "backend": BACKEND}


class Accumulation:
    """A context for each microbatch, instead of `accelerator.accumulate(model)`, that makes all of a step one step.

    Without it, delayed scaling takes every microbatch for a step. Make one before the loop, and enter it in the loop.

    Args:
        accelerator: Whose `gradient_accumulation_steps` say how many microbatches a step has.
        model: What `accelerator.prepare` returned.

    Raises:
        Fp8Error: If Accelerate does something that contradicts fp8pass, see `check`.
    """

    def __init__(self, accelerator: Accelerator, model: Any) -> None:
        check(accelerator, model)
        self.accelerator = accelerator
        self.model = model
        self._step, self._microbatch = OpenStep(), ExitStack()

    def __enter__(self) -> None:
        """Begin a microbatch, and a step if none is under way."""
        self._step.begin(self.model)
        self._microbatch.enter_context(self.accelerator.accumulate(self.model))

    def __exit__(self, failed: Any, *_: Any) -> None:
        """End the microbatch, and the step if the optimizer has stepped, or if an error ends the loop."""
        self._microbatch.close()
        if self.accelerator.sync_gradients or failed:
            self._step.end()


@functools.cache
def accept_backend() -> None:
    """Let Accelerate, and transformers' `torch_compile_backend`, take "fp8pass" as the name of a backend.

    Accelerate looks names up in an enumeration, which has the backends of torch and a few others.
    """
    # made by hand: Python does not let an enumeration with members be extended
    member = str.__new__(DynamoBackend, BACKEND.upper())
    member._name_ = member._value_ = BACKEND.upper()
    inherited = DynamoBackend._missing_

    def missing(cls: type, value: object) -> Any:
        return member if value == BACKEND.upper() else inherited(value)

    # an enumeration calls this for values that it does not have
    DynamoBackend._missing_ = classmethod(missing)


accept_backend()


def check(accelerator: Accelerator | AcceleratorState, model: nn.Module | None = None) -> None:
    """Check that Accelerate does nothing that contradicts fp8pass.

    Args:
        accelerator: An Accelerator, or its state.
        model: The model that is trained, whose parameters' types are checked too.

    Raises:
        Fp8Error: If Accelerate's own FP8 is on too, or DeepSpeed, which compiles models by itself; if autocast
            computes in another type of 16 bits than the parameters have; or if a hook calls the model as it was before
            its regions were compiled.
    """
    precision = accelerator.mixed_precision
    if precision == "fp8":
        raise Fp8Error(
            'Accelerate\'s mixed_precision="fp8" replaces layers by those of another FP8 library: write '
            'mixed_precision="bf16", or drop fp8pass'
        )
    if accelerator.distributed_type == "DEEPSPEED":
        raise Fp8Error("DeepSpeed compiles and shards models by itself: use DDP or FSDP2 with fp8pass, or drop fp8pass")
    if model is not None:
        check_autocast(model, AUTOCAST.get(precision), f'mixed_precision="{precision}"')
        _check_hooks(model)


def _check_hooks(model: nn.Module) -> None:
    """Check that no `forward` that Accelerate's hooks have wrapped is bound to another module than the one it is of.

    `compile_regions` copies modules that contain repeated blocks, with their attributes: accelerate#4253.
    """
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        of = forward.args[0] if isinstance(forward, functools.partial) and forward.args else module
        if isinstance(of, nn.Module) and of is not module and "_hf_hook" in module.__dict__:
            where = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise Fp8Error(
                f"a hook of Accelerate's on {where} calls the module as it was before its regions were compiled, so "
                "nothing that is compiled would run: call accelerate.hooks.remove_hook_from_module(model, "
                "recurse=True) before prepare, or compile the model as a whole (use_regional_compilation=False)"
            )
