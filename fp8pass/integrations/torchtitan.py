"""Train with torchtitan: `in_fp8(llama3_8b(), recipe="rowwise")` in the function that `--config` names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import Field, dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from tyro.constructors import PrimitiveConstructorSpec

from fp8pass.base._torch import MODULE_CALL, checkpoint_reader, flattened
from fp8pass.base.errors import Fp8Error, warn_once
from fp8pass.base.fields import RULE, choose
from fp8pass.options.config import Config, make_config
from fp8pass.options.unmatched import names_of
from fp8pass.recipes import DelayedScaling, Schedule
from fp8pass.states.checkpoint import RECIPE, STEPS, has_layers_of
from fp8pass.states.model_state import state as state_of
from fp8pass.states.steps import accumulate

try:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.config import derive
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError(
        f"fp8pass.integrations.torchtitan is written for torchtitan 0.3, of which {error.name or 'a name'} can't be "
        'imported: python -m pip install "torchtitan==0.3.0", with what it requires'
    ) from error

KEY = "fp8"
"""The key of the state in torchtitan's checkpoints."""


def _option(config_field: Field[Any]) -> tuple[str, Any, Any]:
    """Return name, type and default of an option: its text on the command line is that of its FP8PASS_ variable."""
    rule = config_field.metadata[RULE]
    text = PrimitiveConstructorSpec(
        nargs=1,
        metavar="TEXT",
        instance_from_str=lambda texts: rule.parsed(config_field.name, texts[0]),
        is_instance=lambda _: True,  # a config may hold any value, such as a recipe object
        str_from_instance=lambda value: [str(value)],
    )
    name = config_field.name
    return name, Annotated[Any, text], field(default_factory=lambda: getattr(make_config(), name))


_OPTIONS = [option for option in fields(Config) if option.metadata[RULE].parse is not None]


@dataclass(kw_only=True, slots=True)
class Fp8Options(make_dataclass("_Options", map(_option, _OPTIONS), kw_only=True)):  # type: ignore[misc]
    """The fields of `fp8pass.Config` as a section of torchtitan's config: `--fp8.recipe rowwise --fp8.strict true`.

    All but `amax_group`, which `Fp8Trainer` takes from torchtitan's mesh.
    """

    def config(self, amax_group: ProcessGroup | None = None) -> Config:
        """Return the options as a `Config`. Raises ValueError for an invalid value."""
        return Config(amax_group=amax_group, **{option.name: getattr(self, option.name) for option in _OPTIONS})

    def to_dict(self) -> dict[str, str]:
        """Return the options as text, for torchtitan's logs of its config."""
        return {option.name: str(getattr(self, option.name)) for option in _OPTIONS}


class Fp8Trainer(Trainer):  # type: ignore[misc]  # torchtitan has no types
    """torchtitan's Trainer, which compiles with fp8pass the modules that torchtitan compiles.

    The microbatches of a step, of gradient accumulation and of pipelines, are one step of delayed scaling. Its state is
    in torchtitan's checkpoints, and amaxes are reduced over the ranks that share a stage of the pipeline.

    Raises:
        Fp8Error: If torchtitan's config contradicts fp8pass; the message says what to change.
        ValueError: If an option of fp8pass is invalid.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's config with a section `fp8`."""

        fp8: Fp8Options = field(default_factory=Fp8Options)

    def __init__(self, config: Config) -> None:
        check(config)
        parallelize = compiling(config.model_spec.parallelize_fn, config.fp8)
        changes: dict[str, Any] = {
            "model_spec": replace(config.model_spec, parallelize_fn=parallelize),
            # torchtitan refuses other names for models with FlexAttention, though fp8pass lowers through Inductor
            "compile": replace(config.compile, backend="inductor"),
        }
        if config.checkpoint.enable and _has_state(config.fp8.config()):
            changes["checkpoint"] = derive(config.checkpoint, Fp8CheckpointManager.Config)
        super().__init__(replace(config, **changes))

    def train_step(self, data_iterator: Any) -> None:
        """Make one step of the optimizer, which is one step of delayed scaling."""
        with ExitStack() as step:
            for part in self.model_parts:
                step.enter_context(accumulate(part))
            super().train_step(data_iterator)


def in_fp8(config: Trainer.Config, **options: Any) -> Fp8Trainer.Config:
    """Return a config of torchtitan's Trainer as one that trains in FP8.

    Args:
        config: What a function of a config_registry returns, such as `llama3_8b()`.
        options: Fields of `fp8pass.Config`. `--fp8.<field>` on the command line overrides them.

    Raises:
        Fp8Error: If the config is that of another trainer, which runs its own steps.
        ValueError: If an option is unknown or its value is invalid.
    """
    if type(config) is not Trainer.Config:
        raise Fp8Error(
            f"in_fp8 takes a config of torchtitan's Trainer, not a {type(config).__qualname__}, whose trainer runs "
            "its steps in another way: for this model call torch.compile yourself, or leave fp8pass out"
        )
    for name in options:
        choose("fp8pass option", name, tuple(option.name for option in _OPTIONS))
    fp8 = Fp8Options(**options)
    fp8.config()
    in_fp8_config: Fp8Trainer.Config = derive(config, Fp8Trainer.Config, fp8=fp8)
    return in_fp8_config


def check(config: Fp8Trainer.Config) -> None:
    """Check that nothing in torchtitan's config contradicts fp8pass.

    Raises:
        Fp8Error: If something does; the message says what to change.
        ValueError: If an option of fp8pass is invalid.
    """
    compiles = config.compile
    if not compiles.enable or "model" not in compiles.components:
        raise Fp8Error(
            f"fp8pass works within torch.compile, and compile.enable={compiles.enable} with components "
            f"{compiles.components} does not compile the model: set --compile.enable, with 'model' in "
            "--compile.components"
        )
    if compiles.backend not in ("inductor", "fp8pass"):
        raise Fp8Error(f"compile.backend={compiles.backend!r} is not fp8pass: leave --compile.backend out")
    if has_quantization(config.model_spec.model):
        raise Fp8Error(
            "the model's config has linear layers or experts of torchtitan's own FP8, MXFP8 or NVFP4: leave the "
            "converter out of model_registry(converters=...), or train without in_fp8"
        )
    _check_state(config)


def _check_state(config: Fp8Trainer.Config) -> None:
    options, saves = config.fp8.config(), config.checkpoint
    if not config.training.disable_cuda_graphs and (options.monitor or _has_state(options)):
        raise Fp8Error(
            "torchtitan records forward and backward as a CUDA graph, which replays one step of delayed scaling and of "
            "the monitor: set --training.disable_cuda_graphs, or a recipe without state, such as --fp8.recipe dynamic"
        )
    if saves.enable and _has_state(options) and not isinstance(saves, CheckpointManager.Config):
        raise Fp8Error(
            f"{type(saves).__qualname__} can't hold the FP8 state: write checkpoint=CheckpointManager.Config(...), of "
            "torchtitan.components.checkpoint, or set --checkpoint.no-enable"
        )


def _has_state(config: Config) -> bool:
    """Return whether steps of this configuration depend on earlier ones."""
    return isinstance(config.recipe, Schedule) or any(isinstance(recipe, DelayedScaling) for recipe in config.recipes)


def compiling(parallelize: Callable[..., nn.Module], options: Fp8Options) -> Callable[..., nn.Module]:
    """Return torchtitan's `parallelize`, followed by `compile` with fp8pass for each module that it has compiled."""

    def parallelize_in_fp8(model: nn.Module, *, parallel_dims: ParallelDims, **given: Any) -> nn.Module:
        model = parallelize(model, parallel_dims=parallel_dims, **given)
        config = options.config(_sharing(parallel_dims))
        compiled = [module for module in model.modules() if getattr(module, MODULE_CALL) is not None]
        if not compiled and not parallel_dims.pp_enabled:  # a stage may have an embedding only
            raise Fp8Error(f"torchtitan compiles no module of a {type(model).__name__}: train it without in_fp8")
        for module in compiled:
            module.compile(backend="fp8pass", options={"config": config}, fullgraph=True)
        return model

    return parallelize_in_fp8


def _sharing(parallel_dims: ParallelDims) -> ProcessGroup | None:
    """Return the ranks that share a stage of the pipeline with this one; None for all ranks, without a pipeline."""
    if not parallel_dims.pp_enabled:
        return None
    return flattened(parallel_dims.get_optional_mesh(["batch", "cp", "tp"], include_singleton_axes=True))


class Fp8CheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's manager of DCP checkpoints, whose `states` have the state of delayed scaling too."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """That of torchtitan's manager."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module], states: dict[str, Any], **given: Any) -> None:
        states[KEY] = self._fp8 = _State(model_parts)
        super().__init__(config, model_parts=model_parts, states=states, **given)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint, with the state if it is there. Raises Fp8Error if the state does not fit the model."""
        if KEY in state_dict:
            metadata = checkpoint_reader(checkpoint_id).read_metadata()
            if f"{KEY}.{RECIPE}" in metadata.state_dict_metadata:
                self._fp8.expect(metadata)
            else:
                del state_dict[KEY]
                warn_once(
                    f"fp8pass: the checkpoint {checkpoint_id} has no FP8 state, as it was saved without in_fp8: amax "
                    "histories begin anew, and the first step is scaled dynamically"
                )
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)


class _State(Stateful):
    """The state of all parts of the model that this rank has, by their names in the whole model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._of_parts = [state_of(part) for part in parts]
        self._expected: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as plain tensors: those to fill if a checkpoint is being loaded."""
        return self._expected or {name: x for part in self._of_parts for name, x in part.state_dict().items()}

    def expect(self, metadata: Metadata) -> None:
        """Let the next `state_dict` return empty tensors for what a checkpoint has, of all stages of a pipeline."""
        self._expected = self._of_parts[0].as_saved(metadata, KEY).state_dict()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load into each part what belongs to its layers. Raises Fp8Error if it does not fit them."""
        self._expected = {}
        for part in self._of_parts:
            assert part.module is not None  # the trainer holds it
            names = names_of(part.module)
            of_part = {
                name: x
                for name, x in state_dict.items()
                if name in (STEPS, RECIPE) or has_layers_of(name.rpartition(".")[0], names)
            }
            part.load_state_dict(of_part)
