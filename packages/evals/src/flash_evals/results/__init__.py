"""Records of the commands' findings, and of what these depend on. They import no other package of flash_evals."""
