"""Code that tests share: models, oracles, captured graphs, ranks and a fake GPU."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
