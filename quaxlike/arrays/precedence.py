"""The order in which rules for nested array types are tried if several match.

Types with a larger number are tried first. These are the outer ones when types are nested, and pass on their
contents to the others. (If an inner type were tried first, then it would need a rule for every outer one.)
Types that aren't listed have precedence 0.
"""

ADAPTED = -1  # for any kind of adapter: a type's own rules come first
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
