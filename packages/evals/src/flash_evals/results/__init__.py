"""Records of what the commands found, and of what it depends on. They import no other package of flash_evals."""
