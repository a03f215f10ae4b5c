"""The records in result files. This package imports no other package of flash_evals."""
