"""What `auto` means and what can be known to fail before a rank starts."""
