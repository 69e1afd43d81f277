"""Code that tests share: models, oracles, captured graphs, ranks, a fake GPU, and helpers of files in several tiers."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
