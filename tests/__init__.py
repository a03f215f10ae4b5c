"""All tests. Modules here import each other from this package: `from tests.core.oracle import draw`."""
