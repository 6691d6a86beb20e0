"""Shared by all recipes: options, data, the training loop, checkpoints, metrics and result files."""
