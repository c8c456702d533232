"""The time of a training step against plain PyTorch, at several memory budgets."""
