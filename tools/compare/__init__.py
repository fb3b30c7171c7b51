"""pmesh beside MacFleet, MLX's ring and gloo, at the same work.

    judge          what lines of ranks say: who ended, hung or went on, and who got which sum
    ranks          one rank of pmesh, gloo or MLX's ring
    macfleet_rank  one rank of MacFleet, which the Python that has MacFleet runs
    started        all ranks of a system, as its own pages start them
    run            the rows of the table, each measured

`docs/explanation/comparison.md` has the table.
"""
