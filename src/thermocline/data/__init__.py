"""1. Bytes -> Batch: where examples come from."""
