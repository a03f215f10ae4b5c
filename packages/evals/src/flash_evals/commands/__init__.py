"""The commands: options are read, work is done, its records are kept and shown."""
