"""`runner exec`: a user's own script, with the bundle as its Hub."""
