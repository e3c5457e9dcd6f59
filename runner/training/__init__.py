"""Inside the ranks. Here torch is imported; tasks and trials do so in functions and children."""
