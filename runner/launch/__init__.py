"""`runner train` outside the ranks: checks the run, starts the ranks and watches them."""
