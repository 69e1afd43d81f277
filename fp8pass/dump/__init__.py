"""Write graphs as Python that runs, and run it.

May import: `report` and what is below it.
Does not live here: drawings: they are in `report`.
"""
