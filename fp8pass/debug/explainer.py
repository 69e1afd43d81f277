"""`fp8pass.explain`: what becomes of every matmul, without training anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8pass._torch import TorchDynamoException, dynamo_config
from fp8pass.debug.explain_backend import explain_only
from fp8pass.dynamo.outside import Outside, raise_if_missed
from fp8pass.errors import Fp8Error
from fp8pass.names import PACKAGE, base_name
from fp8pass.options.config import Config, make_config
from fp8pass.report.graph_view import draw
from fp8pass.report.report import Report, collect, publish


def explain(
    function: Callable[..., Any] | nn.Module,
    *args: Any,
    backward: bool = True,
    config: Config | None = None,
    kernels: bool = False,
    **kwargs: Any,
) -> Report:
    """The verdict on every matmul of `function(*args, **kwargs)`: see `fp8pass.report.report.Gemm`.

    Traces forward and, with `backward`, backward for the given inputs, as `torch.compile(..., backend="fp8pass")` does,
    and runs only the forward, in high precision: no gradients, no FP8 state. Random state and buffers are as before.
    The report also has what Dynamo did: where graphs break, which frames it compiled again and why. kernels: let
    Inductor generate code for the tensors' device, without compiling it, for `Report.to_html` to show.

    Raises Fp8Error where Dynamo, AOTAutograd, Inductor or, under `Config(strict=True)`, fp8pass can't go on. It names
    the user's line, as far as that is known, has torch's error as its cause, and what was known by then as `report`.
    Raises TypeError for what can't be called, and for a `config` that is not a `Config`.
    """
    if not callable(function):
        raise TypeError(
            f"explain() takes a module or a function, and then its arguments, not {type(function).__name__}"
        )
    if not isinstance(config, Config | None):
        raise TypeError(f"config is {config!r}: pass fp8pass.Config(recipe=...), say")
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    config = config or make_config()
    outside = Outside([x for x in (function, *args) if isinstance(x, nn.Module)])
    compiled = torch.compile(function, backend=explain_only(config, outside.path_of))
    report = Report()
    buffers = {n: b.clone() for n, b in function.named_buffers()} if isinstance(function, nn.Module) else {}
    recompiles = dynamo_config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16)
    try:
        with (
            draw(kernels) as drawing,
            collect() as report,
            recompiles,
            torch.random.fork_rng(),
            torch.set_grad_enabled(backward),
        ):
            with outside.watching():
                compiled(*args, **kwargs)
            gemms = outside.gemms(config)
            publish(Report(gemms=gemms))
            if config.strict:
                raise_if_missed(gemms)
    except (Fp8Error, TorchDynamoException) as error:
        report.error = _told(error)
        report.pictures = drawing.finish(report.gemms)
        raise _failure(report) from error
    finally:
        outside.forget()
        with torch.no_grad():
            for name, saved in buffers.items():
                function.get_buffer(name).copy_(saved)  # type: ignore[union-attr]
    if not report.graphs:
        report.notes.append(
            "Dynamo compiled nothing: all matmuls ran op by op, for the reasons given"
            if report.gemms
            else "Dynamo compiled nothing: the function has no tensor operations, or compilation is disabled."
        )
    report.pictures = drawing.finish(report.gemms)
    return report


def _failure(report: Report) -> Fp8Error:
    error = Fp8Error(f"{report.error}. Until then: {report.summary()}; this error's `report` has it all")
    error.report = report
    return error


def _told(error: Exception) -> str:
    """What went wrong, in a line, and where in the user's code."""
    reason: BaseException = error
    while isinstance(inner := getattr(reason, "inner_exception", None), Exception):
        reason = inner
    lines = [line.strip() for line in str(reason).splitlines()]
    said = next((line for line in lines if line), type(reason).__name__).rstrip(".")
    if isinstance(reason, Fp8Error):
        return said
    if isinstance(reason, TorchDynamoException) and (
        got := re.search(r"\bgot \w+\((['\"])(.+)\1\)$", str(reason), re.M)
    ):
        said += f": {got[2].rstrip('.')}"  # what an op had to say, which Dynamo has in its explanation
    kind = "" if isinstance(reason, TorchDynamoException) else f"{type(reason).__name__}: "
    where = _place(str(error)) or _place(str(reason))
    return f"{kind}{said}" + (f", at {where}" if where else "")


def _place(text: str) -> str:
    """The last line of the user's that an error's text names, "file.py:12"; "" if it names none."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', text)
    own = [(file, line) for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    return f"{base_name(own[-1][0])}:{own[-1][1]}" if own else ""


_NOT_THE_USERS = (str(Path(torch.__file__).parent), PACKAGE, "<")
