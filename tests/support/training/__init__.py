"""Small models and data, and programs that run as ranks."""
