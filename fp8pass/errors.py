"""The one exception that fp8pass raises of its own accord."""


class Fp8Error(RuntimeError):
    """A matmul that should run in FP8 can't, under `strict=True`; or saved state does not fit. Says what to do."""
