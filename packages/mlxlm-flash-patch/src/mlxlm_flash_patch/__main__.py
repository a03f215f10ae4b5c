"""`python -m mlxlm_flash_patch` is the command `mlxlm-flash`."""

from .cli import main

main()
