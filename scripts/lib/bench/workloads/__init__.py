"""What `scripts/bench` measures: each module makes its materials and its candidates."""
