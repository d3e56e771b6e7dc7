"""The interpreter. If you're new to this code, read values, rules, trace and quaxify first, in this order:
jaxprs, higher_order and inspect build on them.
"""
