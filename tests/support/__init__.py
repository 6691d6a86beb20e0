"""What several tests need: models, tokenizers, a Hub on loopback, recipes, result documents. No tests."""
