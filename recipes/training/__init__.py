"""What all recipes share: options, data, the training loop, states that survive a kill, metrics and result files."""
