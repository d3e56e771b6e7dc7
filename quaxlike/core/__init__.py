"""The interpreter. If you're new to this code, then first read values, rules, trace and quaxify, in this
order. Both jaxprs and higher_order, as well as inspect, build on these.
"""
