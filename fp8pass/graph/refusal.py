"""How a pass refuses: `Reject`, with a rule and a sentence, raised from anywhere in a capture or a check."""

MAX_BATCHES = 16
"""`_scaled_mm` has no batch dimension; a batched matmul becomes at most this many calls."""


class Reject(Exception):
    """A pass can't. May be raised from anywhere in a capture or a check.

    rule: the condition that failed, in a few words; reports count by it. message: one sentence with names and numbers.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class LeftOut(Reject):
    """The recipe, the filter or the prediction does not want this matmul in FP8. No error under `strict`."""
