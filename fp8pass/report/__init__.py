"""Tell what became of every matmul: as objects, a table, a page with drawings.

May import: `graph` and what is below it.
Does not live here: finding anything out: passes and `dynamo` publish what is told here.
"""
