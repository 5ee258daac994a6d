"""Targets: what the loop needs of the model whose answers are wanted."""
