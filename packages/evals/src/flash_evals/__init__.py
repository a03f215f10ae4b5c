"""Measures what flash attention changes in mlx-lm, comparing patch off and patch on. The command is `flash-eval`."""
