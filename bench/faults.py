"""Forty faults, each in another file, such as a compiler engineer could make: `planted_faults.py` plants them.

A fault is known by its text, not by a line: it survives edits, and files that are moved. Each changes what the product
does on a CPU, and by a few characters.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of the product's code that a test has to notice.

    name: of its kind; no two are alike. before: text that occurs once in all product files; after: what replaces it.
    wrong: what goes wrong. elsewhere: a test file that runs the line in processes of its own, of which coverage does
    not know the tests.
    """

    name: str
    before: str
    after: str
    wrong: str
    elsewhere: str = ""


FAULTS = (
    # fp8pass/: numbers and state
    Fault(
        "off by one in the roll of a history",
        "torch.cat([amax.unsqueeze(0), history[:-1]])",
        "torch.cat([amax.unsqueeze(0), history[1:]])",
        "The newest amax replaces the one before it, and the oldest one never leaves the history.",
    ),
    Fault(
        "NaN hidden by a kept weight",
        "scale_inv = scaling.inverse_unless_nonfinite(scales, amax)",
        "scale_inv = scales.reciprocal()",
        "The FP8 copy of a weight with an infinity is dequantized to finite numbers.",
    ),
    Fault(
        "gradients in the format of weights",
        'return E5M2 if role == "grad_output" and self.fp8_format == "hybrid" else E4M3',
        'return E5M2 if role == "grad_output" and self.fp8_format == "e5m2" else E4M3',
        "The hybrid format stores gradients as e4m3, whose range is too small for them.",
    ),
    Fault(
        "a repeated forward rolls again",
        "held=torch.ones_like(t.held),",
        "held=torch.zeros_like(t.held),",
        "A forward that activation checkpointing repeats ends a step, and its histories roll twice per step.",
    ),
    Fault(
        "a backward ends an accumulated step",
        "step_ended.data.logical_or_(held.logical_not())",
        "step_ended.data.fill_(True)",
        "Each microbatch within accumulate() is a step of a ScaleState of the user's.",
    ),
    Fault(
        "a NaN with a sign is below all numbers",
        "torch.where(values < 0, values, values.abs())",
        "values",
        "A NaN that has its sign bit set on one rank is lost in the reduction over ranks.",
    ),
    Fault(
        "missing all-reduce over a mesh's second dimension",
        "for group in groups:\n        bits = all_reduce",
        "for group in groups[:1]:\n        bits = all_reduce",
        "A tensor that is divided over two dimensions of a mesh has a scale for each part.",
        "tests/test_tensor_parallel.py",
    ),
    Fault(
        "stale scale of a gathered weight",
        "weight._scale_inv = scale_inv\n        return None",
        "return None",
        "From the second gathering on, FSDP's weights are dequantized by the scale of the first.",
        "tests/test_fsdp.py",
    ),
    Fault(
        "no room for a first moment to grow",
        '"first": scaling.fp8_max(scaling.E4M3) / 2',
        '"first": scaling.fp8_max(scaling.E4M3)',
        "The largest values of a first moment saturate whenever it grows from one step to the next.",
    ),
    Fault(
        "zeros count as underflow",
        "_sum(nonzero & finite & (q == 0))",
        "_sum(finite & (q == 0))",
        "The monitor says of a tensor with zeros that quantization has made them.",
    ),
    Fault(
        "the copy of a weight is a step too old",
        "(self._steps_stale <= 0 or self._scale_stays())",
        "(self._steps_stale <= 1 or self._scale_stays())",
        "A forward multiplies by a copy that was quantized with the scale of the step before.",
    ),
    Fault(
        "a frozen weight that was changed in place",
        "None if weight.is_inference() else weight._version, weight.data_ptr()",
        "None if weight.is_inference() else 0, weight.data_ptr()",
        "Static inference goes on with the FP8 weight of before an in-place update.",
    ),
    Fault(
        "the largest scale of merged layers",
        "scales[scales > 0].min()",
        "scales[scales > 0].max()",
        "A checkpoint of separate layers gives merged ones a scale under which the largest layer saturates.",
    ),
    Fault(
        "a repeated forward takes the newest scales",
        "state.copy_slots(keys, then, again.scale)",
        "pass",
        "What a checkpointed region computes again differs from its forward, where another forward came in between.",
    ),
    Fault(
        "a second backward is taken for the first",
        "token = (key, current_graph_task_id())",
        "token = (key, 0)",
        "A region whose backward runs twice (retain_graph) finds no forward to repeat the second time.",
    ),
    Fault(
        "the rows of an end belong to the group before",
        "torch.bucketize(torch.arange(rows, device=offs.device), offs, right=True)",
        "torch.bucketize(torch.arange(rows, device=offs.device), offs, right=False)",
        "The first token of each expert is scaled as one of the expert before.",
    ),
    Fault(
        "parts joined one place too far",
        "starts = [sum(sizes[:i]) for i in range(len(sizes))]",
        "starts = [sum(sizes[:i]) + (i > 1) for i in range(len(sizes))]",
        "Generated code gives the fourth slot of a group the scale of the third.",
    ),
    # fp8pass/: caches, verdicts, reports
    Fault(
        "a cache key without the target",
        "return repr((self.recipe, self.strict, self.target))",
        "return repr((self.recipe, self.strict))",
        "A graph compiled for one GPU comes from the cache for another.",
    ),
    Fault(
        "strict forgets what the user quantized",
        'if gemm.status == "rewritten" or not (_chosen(gemm, choices) or gemm.quantized):',
        'if gemm.status == "rewritten" or not _chosen(gemm, choices):',
        "Under strict=True a matmul of the user's own FP8 tensors stays in high precision without an error.",
    ),
    Fault(
        "FLOPs of unknown sizes",
        "product *= size if isinstance(size, int) else 0",
        "product *= size if isinstance(size, int) else 1",
        "A report counts matmuls of symbolic sizes as if these were 1, and says a wrong share of FLOPs.",
    ),
    Fault(
        "text of the summary is taken for HTML",
        "html.escape(report.summary())",
        "report.summary()",
        "A rule with an angle bracket breaks the page, or runs as its script.",
    ),
    Fault(
        "the picture's matmuls in reverse order",
        "op.gemm = became[place].pop(0)",
        "op.gemm = became[place].pop()",
        "Of several equal matmuls at one line, the page shows the verdict of another one.",
    ),
    Fault(
        "differences in the wrong direction",
        "difflib.unified_diff(before.splitlines(True), after.splitlines(True),",
        "difflib.unified_diff(after.splitlines(True), before.splitlines(True),",
        "The .diff of a dump takes out what the pass has put in.",
    ),
    Fault(
        "bisect looks in the wrong half",
        "good, bad = (good, middle) if fails else (middle, bad)",
        "good, bad = (middle, bad) if fails else (good, middle)",
        "A pass that is all right is named as the one that is wrong.",
    ),
    Fault(
        "two calls in one line are one",
        "calls[name, trace] += 1",
        "calls[name, trace] = 1",
        "Bisecting can't tell the second call of a layer in one line from the third.",
    ),
    Fault(
        "the roofline of another matmul",
        '"grad_input": (m, n, k),',
        '"grad_input": (m, k, n),',
        "The predicted time of grad_input is that of the output: its bytes are others.",
    ),
    Fault(
        "one architecture too many",
        "if not first <= target.capability < end:",
        "if not first <= target.capability <= end:",
        "Kernels are promised for the first architecture that does not have them any more.",
    ),
    Fault(
        "a loss of NaN passes",
        "if not gap <= TOLERANCE:",
        "if gap > TOLERANCE:",
        "The demo succeeds when FP8 has diverged to NaN.",
    ),
    # passes/
    Fault(
        "an amax is overwritten by a later use",
        "if index in rounds[-1]:",
        "if index in rounds[-1] and False:",
        "Of a slot that a graph uses twice only the last amax is recorded.",
    ),
    Fault(
        "tiles of block scales are turned",
        "padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)",
        "padded.view(tall, 4, 32, wide, 4).permute(0, 3, 1, 2, 4)",
        "cuBLASLt finds the scales of other rows in its layout for 1x32 blocks.",
    ),
    Fault(
        "different scales are joined",
        "if len(scales := {dq.scale.key() for dq in scaled}) > 1:",
        "if len(scales := {dq.scale.key() for dq in scaled}) > 2:",
        "A cat of two FP8 tensors is dequantized by the scale of the first.",
    ),
    Fault(
        "a scale moves in front of a bias",
        "(node.target in MULTIPLYING or node.target in DIVIDING) and so_far.bias is None and not clamped",
        "(node.target in MULTIPLYING or node.target in DIVIDING) and not clamped",
        "(x @ w + bias) * s becomes s * (x @ w) + bias.",
    ),
    Fault(
        "padding to multiples of 8",
        'ALIGNMENT = 16\n"""K and N must be multiples',
        'ALIGNMENT = 8\n"""K and N must be multiples',
        "cuBLASLt refuses matmuls whose K or N is an odd multiple of 8.",
    ),
    Fault(
        "siblings merged across a write",
        "stretch += mutates(node) or node.target in MODE_CHANGES",
        "stretch += node.target in MODE_CHANGES",
        "A layer that reads a tensor after it was changed in place gets the tensor of before.",
    ),
    Fault(
        "missing all-reduce of a dynamic scale",
        'elif of == "whole":',
        'elif of == "all":',
        "Ranks quantize their parts of a gathered tensor by scales of their own, and dequantize by one.",
    ),
    Fault(
        "the first moment's number for all",
        "(m.kind, x_q, moment_scales, i, m.dtype)",
        "(m.kind, x_q, moment_scales, 0, m.dtype)",
        "All moments of an optimizer are read by the scale of the first one.",
    ),
    Fault(
        "scales along the wrong axis",
        "return ops.Rowwise(recipe, dtype, contracted)",
        "return ops.Rowwise(recipe, dtype, (x.dim() - 1,))",
        "Rowwise scales differ along the sum, where a gradient contracts another dimension than the last.",
    ),
    Fault(
        "missing reciprocal of a row's scale",
        "return emit(aten.reciprocal.default, scale) if self.node.target in DIVIDING else scale",
        "return scale",
        "Rows that the user divides by their scales are multiplied with them.",
    ),
    Fault(
        "the sign of a shared scale",
        "key = scale.number, scale.key(), val(operand).device",
        "key = scale.key(), val(operand).device",
        "Of two matmuls whose scales differ in sign, the second has the scale of the first.",
    ),
    Fault(
        "a skipped step is remembered",
        "graph.call_function(ops.forget_step, (bad, amax))",
        "graph.call_function(ops.restore_where, (bad, amax, amax))",
        "The amaxes of a step that skip_nonfinite left out still make the scales of the next one.",
    ),
)
