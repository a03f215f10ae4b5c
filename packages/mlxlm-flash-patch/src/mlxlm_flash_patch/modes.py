"""The values of the environment variable MLXLM_FLASH."""

MODES = ("0", "1", "strict", "float32", "float32,strict")
