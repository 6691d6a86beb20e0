"""Model cards made from measured results, and publishing a checkpoint with its card."""
