"""Reports for users: how a program treats a type, and which rules exist for a type."""
