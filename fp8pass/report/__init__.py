"""Report the verdict on every matmul, as objects, a table, or a page with drawings.

May import: `graph` and what is below it.
Does not live here: code that finds verdicts; passes and `dynamo` publish them here.
"""
