"""What people call to find something out: explain, bisect, stats, plots, the environment.

May import: Everything but `inspect`, `demo` and cli.
Does not live here: what training needs: nothing below imports this.
"""
