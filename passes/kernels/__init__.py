"""Rewrite the graphs of forward, backward and update, and write their kernels: fewer, with fewer bytes."""
