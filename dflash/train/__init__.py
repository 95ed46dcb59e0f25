"""Stage 2: cache -> sampler -> batches -> objective -> optimizer -> checkpoint."""
