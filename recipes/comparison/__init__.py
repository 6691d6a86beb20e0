"""The parts of `compare.py`: the plan, the runs and the report."""
