"""`Config`: all options of fp8pass. Only this file reads the FP8PASS_* environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fp8pass.base._torch import flattened, inductor_config, list_mode_options
from fp8pass.base.errors import Fp8Error, first_line, warn_once
from fp8pass.base.fields import (
    FLAG,
    PATH,
    RULE,
    Checked,
    Rule,
    called_with,
    choose,
    flag,
    names,
    nearest,
    ratio,
    several,
    whole,
    wrong,
)
from fp8pass.gpu.here import HOW
from fp8pass.gpu.machine_file import load_machine
from fp8pass.gpu.target import TARGETS, Target
from fp8pass.quant.moments import NAMED, Moments
from fp8pass.recipes import ByModule, DelayedScaling, Disabled, Plan, Recipe, Schedule, matches, resolve

Filter = Callable[[str, int, int, int], bool] | Sequence[str] | str | None
LOWERINGS = ("inductor", "eager")
ON_FAULT = ("warn", "raise")
OPTIMIZER_STATES = ("off", *NAMED)
UPDATE_ROUNDINGS = ("nearest", "stochastic")
FROZEN = ("off", "fp8")
UPDATE_MATMULS = ("off", "fp8")
EPILOGUES = ("auto", "off", "always")
WEIGHT_AMAXES = ("measured", "predicted")
WEIGHT_CACHES = ("off", "fp8", "fp8+transpose")


def _filter(name: str, value: Any) -> Any:
    patterns = several(
        "a function (fqn, M, K, N) -> bool, or patterns of names to leave out, ['head', '*.gate'], or None"
    )
    rule = called_with(("", 1, 1, 1), "(fqn, M, K, N)") if callable(value) else patterns
    return rule.take(name, value)


def _flag_or_patterns(valid: str) -> Rule:
    def take(name: str, value: Any) -> Any:
        return value if isinstance(value, bool) else several(valid).take(name, value)

    return Rule(take, _parse_flag_or_patterns)


def _parse_flag_or_patterns(variable: str, text: str) -> Any:
    is_flag = text.lower() in ("0", "1", "false", "true")
    return (FLAG if is_flag else _PATTERNS).parsed(variable, text)


def _optimizer_state(name: str, value: Any) -> Any:
    return value if isinstance(value, Moments) else names(*OPTIMIZER_STATES).take(name, value)


def _target(name: str, value: Any) -> Any:
    return value if isinstance(value, Target) else names(*TARGETS).take(name, value)


def _machine(name: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or (value not in HOW and not os.path.isfile(value)):
        raise wrong(name, value, f"{' or '.join(map(repr, HOW))}, or the path of a file that `fp8pass machine` wrote")
    if value not in HOW:
        load_machine(value)
    return value


def _group(name: str, value: Any) -> Any:
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this rank is not in {name}: pass the group of the ranks that train the same model")
    if not isinstance(value, ProcessGroup | DeviceMesh | None):
        raise wrong(name, value, "a torch.distributed.ProcessGroup or DeviceMesh, or None")
    # `Reduction.process_group` flattens a mesh when it is first asked, which is a collective of the whole world
    if isinstance(value, DeviceMesh) and value.ndim > 1 and value.size() < dist.get_world_size():
        raise ValueError(
            f"{name} is a mesh of {value.ndim} dimensions and {value.size()} of {dist.get_world_size()} ranks: "
            "all ranks make its group together, and may not compile together. Pass mesh._flatten(), made before"
        )
    return value


_PATTERNS = several("")
FILTER = Rule(_filter, _PATTERNS.parse)
MONITOR = _flag_or_patterns("True, False, or patterns of slots: ['layers.3', '*.grad_output']")
MODULES = _flag_or_patterns("True, False, or patterns of modules: ['layers.3', '*.gate']")
GROUP = Rule(_group)
OPTIMIZER_STATE = Rule(_optimizer_state, lambda _, text: text)
TARGET = Rule(_target, lambda _, text: text)
MACHINE = Rule(_machine, lambda _, text: text)
RECIPE = Rule(lambda name, value: resolve(value, name), lambda _, text: None if text.lower() == "none" else text)
STEPS = whole(1, "a number of steps, 1 or more")
BYTES = whole(1, "a number of bytes, 1 or more")


@dataclass(frozen=True)
class Reduction(Checked):
    """The ranks among which amaxes are reduced, and how often: see `amax_reduction.py`.

    group: a process group; a mesh, for all of its ranks; None for the default group. interval: steps from one reduction
    to the next.
    """

    group: ProcessGroup | DeviceMesh | None = field(default=None, metadata=GROUP.field)
    interval: int = field(default=1, metadata=STEPS.field)

    def process_group(self) -> ProcessGroup | None:
        """Return the group; None if it has one rank, or torch.distributed is not initialized."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self.group
        if group is None:
            group = dist.group.WORLD
        elif isinstance(group, DeviceMesh):
            group = flattened(group)
        return group if dist.get_world_size(group) > 1 else None


@dataclass(frozen=True)
class Config(Checked):
    """Options of `torch.compile(model, backend="fp8pass", options={...})`.

    Raises:
        ValueError: If a field or a value is unknown; the message names the valid ones and the nearest.
    """

    recipe: str | Mapping[str, Any] | Plan | Schedule = field(default="delayed", metadata=RECIPE.field)
    """A name, a recipe object, a dict {name pattern: recipe or None} of which the first match counts, or a `Schedule`
    of these by step. None: insert nothing, and only rewrite the quantize-dequantize that the user wrote."""
    filter: Filter = field(default=None, metadata=(FILTER | None).field)
    """`callable(fqn, M, K, N) -> bool`, true for what to take; or name patterns (`head`, `*.attn.*`) to leave out."""
    min_speedup: float = field(default=1.0, metadata=ratio(0, "a ratio of times, 0 (no rule) or more").field)
    """A matmul predicted to gain less is declined. 0 turns the rule off. On CPU it applies only with `target`."""
    merge_siblings: bool | None = field(default=None, metadata=(flag("True, False or None") | None).field)
    """Merge linear layers that read one tensor into one matmul, with one scale for all their weights and one for all
    gradients. None: if that is predicted to be faster, which is never the case on CPU without `target`."""
    epilogues: str = field(default="auto", metadata=names(*EPILOGUES).field)
    """Let a matmul's kernel compute the ops after it, and quantize the result: "auto" where that is faster by what was
    measured on this kind of GPU, "always" wherever it is possible, "off" nowhere. Only on GPUs, and with scales that
    are known before the product, as delayed scaling's."""
    weight_cache: str = field(default="off", metadata=names(*WEIGHT_CACHES).field)
    """The copies of each weight that are kept between optimizer steps. "off": none, the weight is quantized in every
    forward. "fp8": its FP8 copy, 1 byte per element. "fp8+transpose": that and a transposed copy, 2 bytes per element;
    the default of `fp8pass.train_step`. Rowwise scaling quantizes the transposed copy with scales of its own. Not with
    scales of blocks, and only for 2-D weights."""
    weight_amax: str = field(default="measured", metadata=names(*WEIGHT_AMAXES).field)
    """How the scale of a weight's FP8 copy is found, which the kernel writes that updates the weight. "measured": from
    the amaxes of earlier steps, as delayed scaling does. "predicted": from the most that the update can make of the
    weight, by the options of Adam or SGD; it never saturates. Only in `fp8pass.train_step`."""
    max_grad: float | None = field(default=None, metadata=(ratio(0, "a number above 0, or None") | None).field)
    """With `weight_amax="predicted"` and SGD: the most that an element of a gradient can be when the optimizer reads
    it, such as the `max_norm` of `clip_grad_norm_`. Adam's step does not depend on it."""
    save_fp8: bool | str | Sequence[str] = field(default=False, metadata=MODULES.field)
    """Save what the backward of elementwise ops and norms reads in FP8, 1 byte per element: True, or name patterns of
    modules (`layers.3.*`, `*.gate`) that compute or normalize it. Gradients are then those at the quantized tensors."""
    smooth_swiglu: bool | str | Sequence[str] = field(default=False, metadata=MODULES.field)
    """Divide the gated activation that a linear layer reads by a power of two for each channel, and multiply the weight
    by it, exactly: True, or name patterns of these layers (`*.down_proj`). No channel then outgrows the scale of
    delayed scaling; the weight is quantized in each forward, by its own amax."""
    accumulate_in_matmul: bool = field(default=True, metadata=FLAG.field)
    """Let the matmul of a weight's gradient add to the float32 `.grad` that earlier microbatches have left, instead of
    a kernel after it: in graphs that are compiled within `fp8pass.accumulate`, and in a `fp8pass.train_step` that loops
    over microbatches. Only with torch 2.15 on GPUs, with one scale for each operand, and not under
    DistributedDataParallel or with CUDA graphs."""
    frozen: str = field(default="off", metadata=names(*FROZEN).field)
    """"fp8" keeps weights of linear layers that require no gradient in FP8 alone, 1 byte per element, from the moment
    their layer is compiled: see `fp8pass.freeze`."""
    optimizer_state: str | Moments = field(default="off", metadata=OPTIMIZER_STATE.field)
    """How an optimizer's moments are stored. "fp8": first moments in e4m3, the square roots of second moments in e5m2,
    2 bytes per parameter instead of 8. "fp8+float16": these roots in float16, 3 bytes. A `fp8pass.Moments` for other
    formats. Only in `fp8pass.train_step`, for compiled optimizers."""
    update_rounding: str = field(default="nearest", metadata=names(*UPDATE_ROUNDINGS).field)
    """"stochastic" computes updates of bfloat16 parameters in float32, and rounds each result once, up or down by
    chance, so that small steps count as they would in float32. Only in `fp8pass.train_step`."""
    update_matmuls: str = field(default="off", metadata=names(*UPDATE_MATMULS).field)
    """"fp8" runs the matmuls of compiled updates, such as Muon's, in FP8, with scales of rows that are not rounded."""
    update_in_backward: bool = field(default=False, metadata=FLAG.field)
    """Update each parameter while the backward runs, as soon as its gradient is complete, and free the gradient. Only
    in `fp8pass.train_step`, for steps with one backward that leave gradients as they are: no clipping, no scaler."""
    update_bucket_bytes: int = field(default=2**26, metadata=BYTES.field)
    """With `update_in_backward`: the bytes of gradients from which an update runs. Smaller ones wait for the next."""
    skip_nonfinite: bool = field(default=False, metadata=FLAG.field)
    """Skip an optimizer step whose gradients hold a NaN or an infinity: parameters, moments and FP8 state stay
    unchanged, and `TrainStep.skipped` counts it. Only for compiled optimizers, as in `fp8pass.train_step`."""
    monitor: bool | str | Sequence[str] = field(default=False, metadata=MONITOR.field)
    """Collect statistics of the quantization of each tensor in the graph, for `fp8pass.stats`: True for all, or name
    patterns of slots (`layers.3`, `*.grad_output`). Only while gradients are enabled."""
    monitor_interval: int = field(default=1, metadata=STEPS.field)
    """Monitor one in this many steps. The other steps run a graph without the monitor, which is compiled too."""
    monitor_steps: int = field(default=128, metadata=STEPS.field)
    """Number of monitored steps whose statistics are kept, on the device: 52 bytes per step and tensor."""
    monitor_kurtosis: float | None = field(
        default=None, metadata=(ratio(1, "a kurtosis, 1 or more, or None; a normal distribution has 3") | None).field
    )
    """Warn once of each activation whose kurtosis exceeds this, when the statistics are read. None: never."""
    reduce_amax: bool = field(default=True, metadata=FLAG.field)
    """With torch.distributed: one all-reduce per step gives delayed scaling the same scales on all ranks. Every rank of
    the group must train the same model with the same options; otherwise all raise `Fp8Error` in the first step."""
    reduce_amax_interval: int = field(default=1, metadata=STEPS.field)
    """Reduce in one of this many steps, including the amaxes of the steps between; until then scales may differ."""
    amax_group: ProcessGroup | DeviceMesh | None = field(default=None, metadata=GROUP.field)
    """The ranks that share the model: all data, sequence and tensor parallel ranks of one pipeline stage. A process
    group; a device mesh, for all of its ranks; None for the default group."""
    strict: bool = field(default=False, metadata=FLAG.field)
    """Raise `Fp8Error` for a matmul that was chosen, or that the user quantized, but is not rewritten."""
    on_fault: str = field(default="warn", metadata=names(*ON_FAULT).field)
    """The response to an internal error of fp8pass, for example in a pass: "warn" compiles the graph without the part
    that failed, and warns; "raise" raises `Fp8Error`, as `strict` does."""
    target: str | Target | None = field(default=None, metadata=(TARGET | None).field)
    """The GPU to decide for ("sm_90", "rtx4090", ..., or what `fp8pass.roofline.load_machine` returns) if it isn't the
    one that the tensors are on."""
    machine: str = field(default="measured", metadata=MACHINE.field)
    """Where the figures of the GPU come from that the tensors are on. "measured": from three kernels, timed once for
    half a second and kept in Inductor's cache folder, and from trials where tables do not know which FP8 matmuls it
    has. "published": from tables alone. Otherwise the path of a file that `fp8pass machine` wrote."""
    mode: str | None = field(default=None, metadata=(names(*list_mode_options()) | None).field)
    """One of Inductor's modes, as in `torch.compile(mode=...)`."""
    lowering: str = field(default="inductor", metadata=names(*LOWERINGS).field)
    """"eager" runs the rewritten graphs op by op, to tell an error of fp8pass from one of Inductor."""
    compile_once: bool | None = field(default=None, metadata=(flag("True, False or None") | None).field)
    """Compile equal layers of a graph once, as a function that is called with the parameters and state of each. None
    for yes, unless `mode` records CUDA graphs while `update_in_backward` waits for the gradients of each layer."""
    dump_dir: str | None = field(default=None, metadata=(PATH | None).field)
    """Folder for a dump of every graph before and after every pass."""

    @property
    def compiles_once(self) -> bool:
        """True if equal layers are compiled once."""
        return not (self.records_graphs and self.update_in_backward) if self.compile_once is None else self.compile_once

    @property
    def records_graphs(self) -> bool:
        """True if CUDA graphs are recorded."""
        options = list_mode_options(self.mode) if self.mode is not None else {}
        return bool(options.get("triton.cudagraphs", inductor_config.triton.cudagraphs))

    @property
    def moments(self) -> Moments | None:
        """How moments are stored; None for as they are."""
        return NAMED.get(self.optimizer_state) if isinstance(self.optimizer_state, str) else self.optimizer_state

    @property
    def rounds_stochastically(self) -> bool:
        """True if updates round bfloat16 parameters stochastically."""
        return self.update_rounding == "stochastic"

    @property
    def caches_weights(self) -> bool:
        """True if FP8 copies of weights are kept."""
        return self.weight_cache != "off"

    @property
    def caches_transposes(self) -> bool:
        """True if transposed FP8 copies of weights are kept too."""
        return self.weight_cache == "fp8+transpose"

    @property
    def reduction(self) -> Reduction | None:
        """The reduction of delayed scaling's amaxes among ranks; None for none. Not for schedules: see `at_step`."""
        return self.reduction_for(self.recipes)

    def reduction_for(self, recipes: Iterable[Recipe]) -> Reduction | None:
        """Return the reduction for matmuls with these recipes; None if none of them is delayed scaling."""
        if not self.reduce_amax or not any(isinstance(recipe, DelayedScaling) for recipe in recipes):
            return None
        return Reduction(self.amax_group, self.reduce_amax_interval)

    @property
    def recipes(self) -> list[Recipe]:
        """The recipes of all matmuls. Not for schedules: see `at_step`."""
        plan = self.recipe
        recipes = [recipe for _, recipe in plan.rules] if isinstance(plan, ByModule) else [plan]
        return [recipe for recipe in recipes if isinstance(recipe, Recipe)]

    def monitors(self, slot: str) -> bool:
        """Return whether `monitor` selects the tensor of this slot.

        Args:
            slot: Name of the slot, such as `layers.3.up.input`.
        """
        return _selects(self.monitor, slot)

    def saves(self, name: str) -> bool:
        """Return whether `save_fp8` selects the tensor with this name.

        Args:
            name: Path of the module that computes or normalizes it, such as `layers.3.gate`.
        """
        return _selects(self.save_fp8, name)

    def smooths(self, name: str) -> bool:
        """Return whether `smooth_swiglu` selects the linear layer with this name.

        Args:
            name: Path of the layer that reads a gated activation, such as `layers.3.down_proj`.
        """
        return _selects(self.smooth_swiglu, name)

    def leaves_out(self, fqn: str, m: int, k: int, n: int) -> str:
        """Return the reason why `filter` leaves this matmul out; "" if it does not.

        Args:
            fqn: Name of the matmul, which is its module's path.
            m: Rows of the first operand, [M, K].
            k: Size of the summed dimension.
            n: Columns of the second operand, [K, N].

        Raises:
            Fp8Error: If the user's function raises.
        """
        if self.filter is None:
            return ""
        if callable(self.filter):
            return "" if self._filtered(fqn, m, k, n) else f"filter({fqn!r}, {m}, {k}, {n}) is false"
        hit = next((p for p in self.filter if matches(fqn, p)), None)
        return f"{fqn!r} matches the filter's pattern {hit!r}" if hit else ""

    def _filtered(self, *matmul: Any) -> Any:
        assert callable(self.filter)
        try:
            return self.filter(*matmul)
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            raise Fp8Error(f"filter({', '.join(map(repr, matmul))}) raised {what}. Fix the function") from error

    def recipe_of(self, fqn: str) -> tuple[Recipe | None, str]:
        """Return the recipe of the matmul with this name. Not for schedules: see `at_step`.

        Args:
            fqn: Name of the matmul, which is its module's path.

        Returns:
            (recipe, ""), or (None, reason) if the matmul has none; the reason is "" if no matmul has a recipe.
        """
        assert not isinstance(self.recipe, (str, Schedule)), self.recipe
        if isinstance(self.recipe, (ByModule, Disabled)):
            return self.recipe.of(fqn)
        assert self.recipe is None or isinstance(self.recipe, Recipe)
        return self.recipe, ""

    def disabled(self, recipe: Plan | Schedule) -> Config:
        """Return the options of code that quantizes nothing, where `recipe` would apply if it did."""
        return replace(self, recipe=Disabled(recipe), monitor=False)  # nothing is quantized: nothing to monitor

    @property
    def varies(self) -> bool:
        """True if steps differ in what is compiled for them: by a schedule, or a monitor that skips steps."""
        return isinstance(self.recipe, Schedule) or (bool(self.monitor) and self.monitor_interval > 1)

    def at_step(self, step: int, trains: bool = True) -> Config:
        """Return the configuration of one step: without a schedule, and with the monitor on or off.

        Args:
            step: Number of the step, counted from 0.
            trains: False for a graph without gradients, in which the monitor counts nothing.
        """
        begin, counts = self.variant(step, trains)
        recipe = self.recipe.at(begin) if isinstance(self.recipe, Schedule) else self.recipe
        # With an interval of 1, the result does not vary any more.
        return replace(self, recipe=recipe, monitor=self.monitor if counts else False, monitor_interval=1)

    def variant(self, step: int, trains: bool = True) -> tuple[int, bool]:
        """Return a key that is equal for steps whose graphs are compiled with the same options.

        Args:
            step: Number of the step, counted from 0.
            trains: As for `at_step`.

        Returns:
            (the step at which the schedule's phase begins, 0 without a schedule; whether the monitor is on).
        """
        begin = self.recipe.begin_of(step) if isinstance(self.recipe, Schedule) else 0
        return begin, trains and bool(self.monitor) and step % self.monitor_interval == 0

    def cache_key(self) -> str:
        """Return a key for torch's caches, of the options that passes on the joint graph read.

        The other options have already had their effects on that graph, which is part of the key too.
        """
        return repr((self.recipe, self.strict, self.target))


def _selects(patterns: bool | Sequence[str], name: str) -> bool:
    return patterns if isinstance(patterns, bool) else any(matches(name, pattern) for pattern in patterns)


_FIELDS = tuple(f.name for f in fields(Config))
_VARIABLES = {f"FP8PASS_{f.name.upper()}": f for f in fields(Config) if f.metadata[RULE].parse is not None}
_VARIABLES["FP8PASS_DUMP"] = _VARIABLES["FP8PASS_DUMP_DIR"]
_OF_TESTS = "FP8PASS_TEST_"
"""Prefix of variables that the project's tests set; users do not."""


def make_config(
    options: Mapping[str, Any] | None = None, mode: str | None = None, defaults: Mapping[str, Any] | None = None
) -> Config:
    """Return the Config for `torch.compile`'s `options` and `mode`: explicit options over FP8PASS_* over the defaults.

    defaults: values that replace the fields' defaults. Raises ValueError for an unknown option or an invalid value.
    """
    if not isinstance(options, Mapping | None):
        raise wrong("options", options, "a dict of fields of fp8pass.Config, such as {'recipe': 'delayed'}")
    options = dict(options or {})
    if mode is not None:
        options.setdefault("mode", mode)
    config = options.pop("config", None)
    for name in options:
        choose("fp8pass option", name, (*_FIELDS, "config"))
    if config is None:
        return Config(**{**(defaults or {}), **_from_environment(), **options})
    if not isinstance(config, Config):
        raise ValueError(f"option 'config' must be a fp8pass.Config, not {type(config).__name__}")
    return replace(config, **options)


def _from_environment() -> dict[str, Any]:
    """Return options from FP8PASS_* variables. Empty variables count as unset; unknown ones give a warning."""
    values: dict[str, Any] = {}
    for variable in sorted(v for v in os.environ if v.startswith("FP8PASS_") and not v.startswith(_OF_TESTS)):
        text, variable_field = os.environ[variable], _VARIABLES.get(variable)
        if variable_field is None:
            # a higher cutoff than the default, because all of these names begin alike
            near = nearest(variable, _VARIABLES, cutoff=0.75) or f"; there are {', '.join(_VARIABLES)}"
            warn_once(f"fp8pass: the environment variable {variable} is unknown, and ignored{near}")
        elif text:
            values[variable_field.name] = variable_field.metadata[RULE].parsed(variable, text)
    return values
