"""How time, memory and traffic grow with the model, the budget, the batch and the ranks."""
