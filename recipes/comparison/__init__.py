"""Parts of `compare.py`: the plan of the runs, and the report."""
