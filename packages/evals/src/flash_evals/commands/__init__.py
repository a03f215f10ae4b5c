"""The commands: each reads its options, does the work, and saves and prints the results."""
