"""Passes on the graphs of forward, backward and update, and the kernels that they write: fewer, with fewer bytes."""
