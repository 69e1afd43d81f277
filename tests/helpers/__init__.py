"""What the tests share: models, oracles, captured graphs, ranks, a GPU that is not there, and helpers of single files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
