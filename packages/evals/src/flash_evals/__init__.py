"""Measures what flash attention changes in mlx-lm, patch off against patch on. The command is `flash-eval`."""
