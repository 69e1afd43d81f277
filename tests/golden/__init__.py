"""What releases wrote: checkpoints and a report that later code still has to read. `make.py` wrote them."""
