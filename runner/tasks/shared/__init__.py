"""What several tasks share. None of these files is a task."""
