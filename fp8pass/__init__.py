"""fp8pass: `torch.compile(model, backend="fp8pass")` trains a PyTorch model in FP8.

A public name is imported when it is first used, so that a process loads only the features that it uses.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fp8pass.base import _torch as _torch  # first: it says if this torch will not do
from fp8pass.base.versions import __version__ as __version__
from fp8pass.quant import op_namespace

if TYPE_CHECKING:
    from fp8pass import ddp as ddp
    from fp8pass import fsdp as fsdp
    from fp8pass import recipes as recipes
    from fp8pass.base.errors import Fp8Error as Fp8Error
    from fp8pass.base.scaling import cast_to_representable as cast_to_representable
    from fp8pass.base.scaling import dequantize as dequantize
    from fp8pass.base.scaling import quantize as quantize
    from fp8pass.frozen.load import load_frozen as load_frozen
    from fp8pass.frozen.replace import freeze as freeze
    from fp8pass.frozen.replace import unfreeze as unfreeze
    from fp8pass.inspect.bisector import bisect as bisect
    from fp8pass.inspect.explainer import explain as explain
    from fp8pass.inspect.statistics import stats as stats
    from fp8pass.integrations.export import export_fp8 as export_fp8
    from fp8pass.integrations.onnx_file import export_onnx as export_onnx
    from fp8pass.integrations.rewriter import rewrite as rewrite
    from fp8pass.options.config import Config as Config
    from fp8pass.options.setting import autocast as autocast
    from fp8pass.options.setting import enabled as enabled
    from fp8pass.quant.moments import Moments as Moments
    from fp8pass.quant.ops import qdq as qdq
    from fp8pass.recipes import register_recipe as register_recipe
    from fp8pass.states.model_state import state as state
    from fp8pass.states.scale_state import ScaleState as ScaleState
    from fp8pass.states.scale_state import in_qdq as in_qdq
    from fp8pass.states.scale_state import out_qdq as out_qdq
    from fp8pass.states.steps import accumulate as accumulate
    from fp8pass.train.calibration import calibrate as calibrate
    from fp8pass.train.training_step import train_step as train_step

__all__ = [
    "Config",
    "Fp8Error",
    "Moments",
    "ScaleState",
    "accumulate",
    "autocast",
    "bisect",
    "calibrate",
    "cast_to_representable",
    "ddp",
    "dequantize",
    "enabled",
    "explain",
    "export_fp8",
    "export_onnx",
    "freeze",
    "fsdp",
    "in_qdq",
    "load_frozen",
    "out_qdq",
    "qdq",
    "quantize",
    "recipes",
    "register_recipe",
    "rewrite",
    "state",
    "stats",
    "train_step",
    "unfreeze",
]

_HOMES = {
    "Config": "options.config",
    "Fp8Error": "base.errors",
    "Moments": "quant.moments",
    "ScaleState": "states.scale_state",
    "accumulate": "states.steps",
    "autocast": "options.setting",
    "bisect": "inspect.bisector",
    "calibrate": "train.calibration",
    "cast_to_representable": "base.scaling",
    "dequantize": "base.scaling",
    "enabled": "options.setting",
    "explain": "inspect.explainer",
    "export_fp8": "integrations.export",
    "export_onnx": "integrations.onnx_file",
    "freeze": "frozen.replace",
    "in_qdq": "states.scale_state",
    "load_frozen": "frozen.load",
    "out_qdq": "states.scale_state",
    "qdq": "quant.ops",
    "quantize": "base.scaling",
    "register_recipe": "recipes",
    "rewrite": "integrations.rewriter",
    "state": "states.model_state",
    "stats": "inspect.statistics",
    "train_step": "train.training_step",
    "unfreeze": "frozen.replace",
}
"""{public name: the module that defines it}. The other public names are modules."""


def _imported(name: str) -> object:
    """Return a public name, or a module of this package; remember it, so that Python does not ask again."""
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name.startswith("__") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    else:
        value = import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a type checker would take any name for one that exists
    __getattr__ = _imported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


op_namespace.install()
