"""Write graphs as executable Python files, and run these.

May import: `report` and what is below it.
Does not live here: drawings of graphs, which are in `report`.
"""
