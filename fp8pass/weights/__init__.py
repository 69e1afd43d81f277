"""Keep weights and moments in FP8 between steps, and compile the updates that write them."""
