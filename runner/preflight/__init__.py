"""What can be known to fail before a rank starts. Nothing here imports torch."""
