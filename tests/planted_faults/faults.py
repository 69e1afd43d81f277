"""Faults, each in a different file, which a compiler engineer could make; `plant.py` plants them.

A fault is found by its text, not by its line, so that it survives edits and moves of files. Each changes a few
characters, and changes what the product does on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of the product's code that a test must notice.

    name: a unique name. before: text that occurs exactly once in all product files. after: the text that replaces it.
    wrong: what goes wrong. elsewhere: a test file that runs the changed line in other processes, which coverage does
    not see.
    """

    name: str
    before: str
    after: str
    wrong: str
    elsewhere: str = ""


FAULTS = (
    # fp8pass/: numbers and state
    Fault(
        "off by one when a history rolls",
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
        'return E5M2 if role == "grad_output" and fp8_format == "hybrid" else E4M3',
        'return E5M2 if role == "grad_output" and fp8_format == "e5m2" else E4M3',
        "The hybrid format stores gradients as e4m3, whose range is too small for them.",
    ),
    Fault(
        "a repeated forward rolls again",
        "held=torch.ones_like(t.held),",
        "held=torch.zeros_like(t.held),",
        "A forward that activation checkpointing repeats ends a step, so that its histories roll twice per step.",
    ),
    Fault(
        "a backward ends an accumulated step",
        "step_ended.data.logical_or_(held.logical_not())",
        "step_ended.data.fill_(True)",
        "A ScaleState of the user's counts each microbatch within accumulate() as a step.",
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
        "tests/distributed/test_tensor_parallel.py",
    ),
    Fault(
        "stale scale of a gathered weight",
        "weight._scale_inv = scale_inv\n        return None",
        "return None",
        "From the second gathering on, FSDP's weights are dequantized by the scale of the first.",
        "tests/distributed/test_fsdp.py",
    ),
    Fault(
        "no room for a first moment to grow",
        'return self.limit / (2 if self.kind == "first" else 4)',
        'return self.limit / (1 if self.kind == "first" else 4)',
        "The largest values of a first moment saturate whenever it grows from one step to the next.",
    ),
    Fault(
        "zeros count as underflow",
        "_sum(nonzero & finite & (q == 0))",
        "_sum(finite & (q == 0))",
        "The monitor counts zeros that were in the tensor as underflow.",
    ),
    Fault(
        "the FP8 copy of a weight is one step too old",
        "(self.freshness.steps_stale <= 0 or self.is_predicted or self._scale_stays())",
        "(self.freshness.steps_stale <= 1 or self.is_predicted or self._scale_stays())",
        "A forward multiplies by a copy that was quantized with the scale of the previous step.",
    ),
    Fault(
        "a frozen weight that was changed in place",
        "None if weight.is_inference() else weight._version, weight.data_ptr()",
        "None if weight.is_inference() else 0, weight.data_ptr()",
        "Static inference continues with the FP8 weight from before an in-place update.",
    ),
    Fault(
        "the largest scale of merged layers",
        "scales[scales > 0].min()",
        "scales[scales > 0].max()",
        "A checkpoint of separate layers gives merged layers a scale with which the largest layer saturates.",
    ),
    Fault(
        "a repeated forward uses the newest scales",
        "state.copy_slots(keys, then, again.scale)",
        "pass",
        "A checkpointed region computes something else in the backward if another forward ran after its own.",
    ),
    Fault(
        "a second backward is mistaken for the first",
        "token = (key, current_graph_task_id())",
        "token = (key, 0)",
        "A region whose backward runs twice (retain_graph) finds no forward to repeat the second time.",
    ),
    Fault(
        "the row at an offset belongs to the previous group",
        "torch.bucketize(torch.arange(rows, device=offs.device), offs, right=True)",
        "torch.bucketize(torch.arange(rows, device=offs.device), offs, right=False)",
        "The first token of each expert is scaled like a token of the previous expert.",
    ),
    Fault(
        "parts are joined one place too far",
        "starts = [sum(sizes[:i]) for i in range(len(sizes))]",
        "starts = [sum(sizes[:i]) + (i > 1) for i in range(len(sizes))]",
        "Generated code gives the fourth slot of a group the scale of the third.",
    ),
    # fp8pass/: caches, verdicts, reports
    Fault(
        "a cache key without the target",
        "return repr((self.recipe, self.strict, self.target))",
        "return repr((self.recipe, self.strict))",
        "The cache returns a graph for one GPU that was compiled for another.",
    ),
    Fault(
        "strict ignores what the user quantized",
        'if gemm.status == "rewritten" or not (_chosen(gemm, choices) or gemm.quantized):',
        'if gemm.status == "rewritten" or not _chosen(gemm, choices):',
        "Under strict=True a matmul of the user's own FP8 tensors stays in high precision without an error.",
    ),
    Fault(
        "FLOPs of unknown sizes",
        "return int(value) if value.is_number else 0",
        "return int(value) if value.is_number else 1",
        "A report counts matmuls whose sizes depend on data as one FLOP, and has a share of FLOPs that nobody knows.",
    ),
    Fault(
        "text of the summary is read as HTML",
        "html.escape(report.summary())",
        "report.summary()",
        "A rule with an angle bracket breaks the page, or runs as a script in it.",
    ),
    Fault(
        "the picture's matmuls are in reverse order",
        "op.gemms = became[place].pop(0)",
        "op.gemms = became[place].pop()",
        "For several equal matmuls at one line, the page shows another matmul's verdict.",
    ),
    Fault(
        "differences in the wrong direction",
        "difflib.unified_diff(before.splitlines(True), after.splitlines(True),",
        "difflib.unified_diff(after.splitlines(True), before.splitlines(True),",
        "The .diff of a dump shows lines that the pass added as removed.",
    ),
    Fault(
        "bisect looks in the wrong half",
        "good, bad = (good, middle) if fails else (middle, bad)",
        "good, bad = (middle, bad) if fails else (good, middle)",
        "bisect names a correct pass as the faulty one.",
    ),
    Fault(
        "two calls in one line count as one",
        "calls[name, trace] += 1",
        "calls[name, trace] = 1",
        "bisect can't distinguish the second call of a layer in one line from the third.",
    ),
    Fault(
        "the roofline of another matmul",
        '"grad_input": (m, n, k),',
        '"grad_input": (m, k, n),',
        "The predicted time of grad_input is that of the output, which moves other bytes.",
    ),
    Fault(
        "kernels on every architecture",
        "if not table.believed(target.capability):",
        "if not table.believed(target.capability) and False:",
        "fp8pass expects kernels on architectures that do not have them.",
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
        "If a graph uses a slot twice, only the last amax is recorded.",
    ),
    Fault(
        "tiles of block scales are permuted",
        "padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)",
        "padded.view(tall, 4, 32, wide, 4).permute(0, 3, 1, 2, 4)",
        "cuBLASLt reads the scales of other rows from its layout for 1x32 blocks.",
    ),
    Fault(
        "different scales are joined",
        "if len(scales := {dq.scale.key() for dq in scaled}) > 1:",
        "if len(scales := {dq.scale.key() for dq in scaled}) > 2:",
        "A cat of two FP8 tensors is dequantized by the scale of the first.",
    ),
    Fault(
        "a scale moves before a bias",
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
        "stretch += mutates(node) or node.target in MODE_CHANGES\n        if signature_of",
        "stretch += node.target in MODE_CHANGES\n        if signature_of",
        "A layer that reads a tensor after an in-place change gets the tensor from before the change.",
    ),
    Fault(
        "missing all-reduce of a dynamic scale",
        'elif ranks == "whole":',
        'elif ranks == "all":',
        "Each rank quantizes its part of a gathered tensor with its own scale; all are dequantized with one scale.",
    ),
    Fault(
        "the index of the first moment for all moments",
        "(m.stored_as, x_q, moment_scales, i, m.dtype, *blocks)",
        "(m.stored_as, x_q, moment_scales, 0, m.dtype, *blocks)",
        "All moments of an optimizer are dequantized with the scale_inv of the first one.",
    ),
    Fault(
        "scales along the wrong axis",
        "return ops.Rowwise(recipe, dtype, contracted)",
        "return ops.Rowwise(recipe, dtype, (x.dim() - 1,))",
        "Rowwise scales differ within a sum if a gradient's matmul sums over another dimension than the last.",
    ),
    Fault(
        "missing reciprocal of a row's scale",
        "return emit(aten.reciprocal.default, scale) if self.node.target in DIVIDING else scale",
        "return scale",
        "Rows that the user divides by their scales are multiplied by them.",
    ),
    Fault(
        "the sign of a shared scale",
        "key = scale.number, scale.key(), val(operand).device",
        "key = scale.key(), val(operand).device",
        "If the scales of two matmuls differ in sign, the second matmul gets the scale of the first.",
    ),
    Fault(
        "a skipped step stays in the history",
        "graph.call_function(ops.forget_step, (bad, amax))",
        "graph.call_function(ops.restore_where, (bad, amax, amax))",
        "The amaxes of a step that skip_nonfinite skipped still determine the scales of the next step.",
    ),
    # updates that are compiled once, and calls that are one node
    Fault(
        "the scale of the first weight for all weights of a function",
        "tuple(_row(e) if v in e.rows else 0 for e in of_node)",
        "tuple(_row(of_node[0]) if v in e.rows else 0 for e in of_node)",
        "An update that is compiled once writes all copies of a call with one scale.",
    ),
    Fault(
        "a gradient of several calls is that of the first",
        "grads[slot] = g if grads[slot] is None else grads[slot] + g",
        "grads[slot] = g",
        "A tensor that several layers read gets the gradient of the first of them alone.",
    ),
    Fault(
        "an amax is compared with itself",
        "largest)[1:-1], oldest_first[2:]",
        "largest)[2:], oldest_first[2:]",
        "Nobody is told that a jump of the inputs saturated.",
    ),
    Fault(
        "the scale of another tensor",
        "torch.ops.aten.select.int, scales, 0, quantizer.slot)",
        "torch.ops.aten.select.int, scales, 0, 0)",
        "All tensors of a graph are quantized with the scale of its first slot.",
    ),
    Fault(
        "strands that wait for nothing",
        "return 1 if SHARED in (before.owner, after.owner) else 2",
        "return 0",
        "An update reads the norm of all gradients before it is computed.",
    ),
    Fault(
        "a batch that keeps its address",
        "if keeps_address(node) and i not in self._moved",
        "if i not in self._moved",
        "A CUDA graph is recorded again for each batch.",
    ),
    Fault(
        "copies that only compiled updates write",
        "if not known.was_written and known.knows_next_scale]",
        "if known.was_written and known.knows_next_scale]",
        "After a fused optimizer, the next forward quantizes each weight by itself.",
    ),
    Fault(
        "copies of weights that were changed in place",
        "_OF_TENSORS = _version, Tensor.data_ptr",
        "_OF_TENSORS = (Tensor.data_ptr,)",
        "An edit of a weight between two steps changes nothing until the next update.",
    ),
)
