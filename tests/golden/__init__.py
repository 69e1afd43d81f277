"""Checkpoints and a report that releases wrote with `make.py`, and that later code still has to read."""
