"""The interpreter. Read in this order: compat, values, rules, policy, tracer, trace, quaxify, late, slots,
evaluate, subjaxpr, higher_order."""
