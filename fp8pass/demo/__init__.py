"""`fp8pass demo`: train a small language model in high precision and in FP8.

May import: fp8pass as its users do, and modules for output.
Does not live here: code that anything but the command line calls.
"""
