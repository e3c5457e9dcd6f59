"""Inside the ranks: the only wing that imports torch."""
