"""key -> row: one file per tier, and the reference table."""
