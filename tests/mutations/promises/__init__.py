"""Has a module for each group of promises in docs/dev/reliability.md, in a package lest names meet a library's."""
