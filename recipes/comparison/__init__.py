"""What `compare.py` is made of: the plan, the runs, and the report."""
