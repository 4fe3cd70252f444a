"""Input data: files or generated examples, read as batches."""
