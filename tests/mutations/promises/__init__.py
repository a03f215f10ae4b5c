"""A module for each group of promises in docs/dev/reliability.md; in a package, so that no library has their names."""
