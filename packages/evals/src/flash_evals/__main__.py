"""`python -m flash_evals` is the command `flash-eval`."""

from flash_evals.cli import main

main()
