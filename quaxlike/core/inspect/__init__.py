"""Reports for users: what happened to a type, and what is registered for it."""
