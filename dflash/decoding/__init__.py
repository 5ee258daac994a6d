"""The loop and its decisions: tokens in, events out. Knows no text, no HTTP, no files."""
