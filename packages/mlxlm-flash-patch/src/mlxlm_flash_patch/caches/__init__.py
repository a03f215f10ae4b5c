"""mlx-lm's caches with quantised keys and values: plain, rotating, chunked and latent ones, and batches of them.

`quantized` adds its classes to `mlx_lm.models.cache`, where mlx-lm looks up the classes that a prompt cache file names.
"""
