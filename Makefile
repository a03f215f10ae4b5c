# Tests in parts, as CI runs them: all folders, without nightly tests; see tests/lanes.py. `make -k parts` goes on after a
# part that fails. Two files run side by side on any machine, because kernels use all processors.
PYTEST = uv run --all-groups pytest -n 2 --dist loadfile
PARTS = test-core test-patch test-evals test-metal test-cuda test-docs test-packaging
.PHONY: parts $(PARTS)
parts: $(PARTS)
test-core:
	$(PYTEST) --rotate tests/core
test-patch:
	$(PYTEST) --rotate tests/patch tests/examples
test-evals:
	$(PYTEST) --rotate tests/evals
# On the CPU: needs clang-19, see tests/emulators/README.md.
test-metal:
	$(PYTEST) --rotate tests/emulators tests/metal tests/macos
test-cuda:
	$(PYTEST) --rotate tests/cuda
test-docs:
	$(PYTEST) --rotate tests/docs
test-packaging:
	$(PYTEST) --rotate tests/packaging tests/programs

# Every test: hours.
.PHONY: nightly
nightly:
	$(PYTEST) --all tests

# Formatters, linters, types and pages. The first two of .pre-commit-config.yaml's hooks fix what they find.
LINT = uv run --all-groups
.PHONY: lint
lint:
	$(LINT) ruff check .
	$(LINT) ruff format --check .
	$(LINT) mypy
	git ls-files packages/*/csrc tests | grep -E '\.(h|cpp|metal|cu)$$' | xargs $(LINT) clang-format --dry-run -Werror
	$(LINT) python .ci/text.py

# Runs the CUDA kernels on an NVIDIA GPU, in an environment with MLX's CUDA build: the workspace's has the CPU's.
CUDA = 13
.PHONY: cuda-check
cuda-check: export UV_PROJECT_ENVIRONMENT = build/cuda
cuda-check:
	uv sync --group nvrtc
	uv pip install --python build/cuda "flashattn-core[cuda$(CUDA)]"
	uv run --no-sync pytest tests/cuda --all

# The wheel of flashattn-core for all releases of MLX in releases.toml, in dist; see docs/dev/packaging.md.
PYTHONS ?= 3.11 3.12 3.13
RELEASES = packages/flashattn-core/releases
.PHONY: wheel
wheel:
	uv run --no-project --python 3.11 $(RELEASES)/build_wheel.py packages/flashattn-core dist $(PYTHONS)

# Adds a release of MLX to releases.toml, if all that is known of it holds: make follow MLX=0.32.5
.PHONY: follow
follow:
	uv run --no-project --python ">=3.11" $(RELEASES)/follow.py $(MLX)

# Fails if the package index has a newer MLX than releases.toml.
.PHONY: newer
newer:
	uv run --no-project --python ">=3.11" $(RELEASES)/follow.py --newer

# Builds sdists and wheels into dist, and tries the wheels with each Python in PYTHONS; see docs/dev/packaging.md.
.PHONY: wheels
wheels:
	uv run python -m tests.packaging.build_wheels dist $(PYTHONS)
	WHEELS=dist PYTHONS="$(PYTHONS)" uv run pytest tests/packaging --all

# The CPU kernels and the extension under all sanitizers, as `make nightly` runs them: half an hour.
.PHONY: sanitize
sanitize:
	uv run pytest --all tests/core/test_sanitizers.py
