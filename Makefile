# Runs the Metal kernels on this machine's CPU; needs clang-19, see tests/metal/README.md.
.PHONY: metal-check
metal-check:
	uv run pytest tests/metal

# Builds sdists and wheels into dist, and tries the wheels with each Python in PYTHONS; see docs/packaging.md.
PYTHONS ?= 3.11 3.12 3.13
.PHONY: wheels
wheels:
	uv run python tests/packaging/build_wheels.py dist
	WHEELS=dist PYTHONS="$(PYTHONS)" uv run pytest tests/packaging
