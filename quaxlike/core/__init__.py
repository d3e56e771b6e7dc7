"""The interpreter: a spine, to be read in the order compat, values, rules, trace, quaxify; and three wings,
jaxprs, higher_order and inspect."""
