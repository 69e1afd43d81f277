"""`fp8pass demo`: train a small language model in high precision and in FP8.

May import: `debug`, training_step and what is below them, and modules for output.
Does not live here: code that anything but the command line calls.
"""
