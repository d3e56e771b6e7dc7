"""Reports for users: how a program treats a type, and which rules are registered for it."""
