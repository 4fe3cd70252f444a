"""Several ranks: who they are, what they send each other, tables over all of them."""
