"""Benchmarks of speed and memory, each with a table, a plot and one JSON result."""
