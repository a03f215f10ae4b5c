"""Records of what the commands found and of what findings depend on. They import no other package of flash_evals."""
