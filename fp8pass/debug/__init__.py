"""The tools that users call to inspect a run: explain, bisect, stats, plots, the environment.

May import: Everything but `inspect`, `demo` and cli.
Does not live here: code that training needs. No lower package imports this one.
"""
