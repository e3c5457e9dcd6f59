"""`--to`: the road from this machine into the queue of a cluster, and back."""
