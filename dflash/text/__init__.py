"""Text in, text out: templates and detokenising. Imports no MLX, needs no model to be tested."""
