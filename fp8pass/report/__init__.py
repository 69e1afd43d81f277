"""Report the verdict on every matmul, as objects, a table, or a page with drawings."""
