"""Reports for users: how a program treats a type, and which rules a type has."""
