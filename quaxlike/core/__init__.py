"""The interpreter: a spine to read in this order (compat, values, rules, trace, quaxify), and three wings:
jaxprs, higher_order and inspect."""
