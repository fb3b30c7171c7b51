"""Keys and values that the ranks of a job share: what each copy decides (S1)."""
