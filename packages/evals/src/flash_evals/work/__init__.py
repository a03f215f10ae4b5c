"""The measurements: loads models and texts, runs both arms or the kernels, and returns records."""
