"""Array types, one module each; importing one registers rules for its own type only."""
