# Runs the Metal kernels on this machine's CPU; needs clang-19, see tests/metal/README.md.
.PHONY: metal-check
metal-check:
	uv run pytest tests/metal
