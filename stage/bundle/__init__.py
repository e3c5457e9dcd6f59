"""A bundle as files: their names, the working folder of a fetch, what is inside the payload."""
