"""What README.md and recipes/results/README.md say of the result files in recipes/results."""
