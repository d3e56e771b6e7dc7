"""The order in which rules for nested array types are tried if several match.

The larger number comes first. That type is the outer one in a nest, and passes its contents on to the others.
If an inner type came first, it would have to know every outer one. Types that are not listed have 0.
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
