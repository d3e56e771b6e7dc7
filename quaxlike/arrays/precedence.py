"""The order of trying rules for nested array types if several match.

Types with a higher precedence are tried first. If types are nested, these should be the outer ones, which
apply the primitive to their contents. (Inner types, if tried first, would need a rule for every possible
outer type.) Any type not listed has precedence 0.
"""

ADAPTED = -1  # for rules handling any adapter, so that those for a specific type come first
SPARSE_BESIDE_VALUES = -1
LORA = 1
LORA_OF_CODES = LORA + 1
TRAINABLE_ROWS = LORA + 2
COMBINATOR = LORA + 3
METHOD = LORA + 4
ACTIVATED = LORA + 5
IDENTITY = 9
CONSTANT = 10
UNITFUL = 20
NAMED = 30
