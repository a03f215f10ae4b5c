"""What was found: records of figures and of what they depend on. This room imports no other."""
