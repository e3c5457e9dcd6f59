"""The lock: its data model, its reader, its writer, and the bill of materials."""
