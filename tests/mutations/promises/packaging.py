"""Mutations that break the promises about packaging."""

from . import CORE, CPP, Mutation

MUTATIONS: list[Mutation] = [
    Mutation(
        "the extension for macOS looks for libmlx in another folder",
        "packages/flashattn-core/CMakeLists.txt",
        'INSTALL_RPATH "@loader_path/../../mlx/lib"',
        'INSTALL_RPATH "@loader_path/../mlx/lib"',
        "macos/test_wheel.py::test_every_check_passes",
        nightly="it builds wheels",
    ),
    Mutation(
        "a wheel holds a file of the sdist beside its modules",
        "packages/mlxlm-flash-patch/pyproject.toml",
        'only-include = ["src"]',
        'only-include = ["src", "README.md"]',
        "packaging/test_wheels.py::test_files",
    ),
    Mutation(
        "the wheels do not say that they need nanobind's backend",
        "packages/flashattn-core/pyproject.toml",
        '  "nanobind-backend==1.0.0",  #',
        "  #",
        "packaging/test_clean_environment.py::test_the_op_against_the_reference",
        nightly="it builds wheels",
    ),
    Mutation(
        "the import brings numpy in",
        f"{CORE}/__init__.py",
        "from . import masks\n",
        "from . import masks, reference\n",
        "packaging/test_import_time.py::test_nothing_else_is_imported",
    ),
    Mutation(
        "a release of MLX whose tests fail keeps its row",
        "packages/flashattn-core/releases/follow.py",
        "for file, text in texts.items():",
        "for file, text in []:",
        "packaging/test_releases.py::test_what_cannot_be_followed_changes_nothing",
    ),
    Mutation(
        "flash-evals takes newer versions of mlx-lm",
        "packages/evals/pyproject.toml",
        '"mlx-lm>=0.32.0,<0.33"',
        '"mlx-lm>=0.32.0"',
        "packaging/test_versions.py::test_who_needs_which_mlx_lm",
    ),
    Mutation(
        "a parameter's description has the name of another function's",
        f"{CORE}/attention.py",
        "      alibi_slopes: ``(H_q,)``, adds",
        "      slopes: ``(H_q,)``, adds",
        "docs/test_docstrings.py::test_it_names_the_parameters",
    ),
    Mutation(
        "the extension needs a function that only MLX's builds for CUDA have",
        f"{CPP}/cuda/mlx_cuda.h",
        "FLASHATTN_WEAK void set_output_array(",
        "void set_output_array(",
        "packaging/test_wheels.py::test_what_only_mlx_s_builds_for_cuda_have_is_weak",
    ),
]
