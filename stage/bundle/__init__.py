"""A bundle as files: its layout, what is inside the payload, verification, receipts, signature."""
