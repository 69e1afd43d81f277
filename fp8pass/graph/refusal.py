"""`Reject`, the exception with which a pass refuses something, with a rule and a sentence."""

MAX_BATCHES = 16
"""`_scaled_mm` has no batch dimension; a batched matmul becomes at most this many calls."""


class Reject(Exception):
    """Raised, anywhere in a match or a check, if a pass cannot rewrite something.

    rule: the condition that failed, in a few words; reports count by it. message: one sentence with names and numbers.

    A file that makes one has the rule's line of docs/limits.md in a literal, read by docs/limits.py: `LIMITS = {table:
    {rule: (what holds, what a user can do)}}`. The tables are "declined" (matmuls that the recipe selects), "detected"
    (when QDQ is looked for), "saved" (by `save_fp8`), "outside" (of graphs) and "collectives".
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class LeftOut(Reject):
    """Raised if the recipe, the filter or the prediction leaves a matmul out, which is not an error under `strict`."""
