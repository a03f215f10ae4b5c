"""The page that `flash-eval report` makes of result files."""
