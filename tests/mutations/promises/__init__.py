"""A file for each group of promises in docs/dev/reliability.md. A package, so that no library has their names."""
