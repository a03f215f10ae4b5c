"""A module for each group of promises in docs/dev/reliability.md; a package, lest a library have their names."""
