"""The order in which the rules of nested array types are tried if several match.

A type with a larger number comes first: it is the outer one of a nest, and passes what it holds on to
the others. Types that are not listed have 0.
"""

ADAPTED = -1  # of any kind: what a type of adapters says of itself comes first
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
