"""The interpreter. Read in this order: compat, values, rules, policy, trace, quaxify, slots, subjaxpr,
higher_order."""
